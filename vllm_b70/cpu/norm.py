"""Gated RMS norm on the CPU: one row at a time, one order of addition.

torch computes the gate's exp by another function in the tail of each thread's share than elsewhere,
and the shares follow the number of rows: from three threads on that shows in the fp32 gate.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

ONE = np.float32(1.0)


@njit(cache=True, parallel=True, nogil=True)
def gated_rms_norm(x, z, weight, epsilon, sigmoid_only, out):  # type: ignore[no-untyped-def]
    """out = x / sqrt(mean(x * x) + epsilon) * weight * act(z).

    Args:
        x: [R, D] float32 that holds 16-bit values.
        z: [R, D] the same.
        weight: [D] float32.
        epsilon: float32.
        sigmoid_only: act is sigmoid, else silu.
        out: [R, D] float32, filled.
    """
    size = x.shape[1]
    for r in prange(x.shape[0]):
        total = np.float32(0.0)
        for d in range(size):
            total += x[r, d] * x[r, d]
        scale = ONE / math.sqrt(total / np.float32(size) + epsilon)
        for d in range(size):
            gate = ONE / (ONE + math.exp(-z[r, d]))
            if not sigmoid_only:
                gate = z[r, d] * gate
            out[r, d] = x[r, d] * scale * weight[d] * gate
