"""Gated delta rule on the CPU: reference.gated_delta_rule with every order of addition fixed.

One (sequence, value head) is one unit of parallel work; its tokens are computed one by one, so a
sequence gets the same bits however many tokens of it, or other sequences, share a call.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

EPSILON = np.float32(1e-6)
ONE = np.float32(1.0)
SOFTPLUS_THRESHOLD = np.float32(20.0)


@njit(inline="always")
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return ONE / (ONE + math.exp(-x))


@njit(cache=True, parallel=True, nogil=True)
def causal_conv(x, history, weight, bias, starts, out):  # type: ignore[no-untyped-def]
    """Depthwise causal convolution and silu.

    Args:
        x: [T, D] float32 that holds 16-bit values.
        history: [S, W - 1, D] float32, the inputs before each sequence's first.
        weight: [D, W] float32 that holds 16-bit values.
        bias: [D] float32, or [0].
        starts: [S + 1] int64, where each sequence's tokens start in ``x``.
        out: [T, D] float32, filled.
    """
    width = weight.shape[1]
    channels = x.shape[1]
    for sequence in range(starts.shape[0] - 1):
        first = starts[sequence]
        for t in prange(starts[sequence + 1] - first):
            for d in range(channels):
                y = np.float32(0.0)
                for j in range(width):
                    source = t - (width - 1) + j
                    if source < 0:
                        y += history[sequence, width - 1 + source, d] * weight[d, j]
                    else:
                        y += x[first + source, d] * weight[d, j]
                if bias.shape[0] > 0:
                    y += bias[d]
                out[first + t, d] = y * _sigmoid(y)


@njit(cache=True, parallel=True, nogil=True)
def gates(a, b, a_log, dt_bias, decay, beta):  # type: ignore[no-untyped-def]
    """Logarithm of the decay, and the write gate.

    Args:
        a: [T, H] float32.
        b: [T, H] float32.
        a_log: [H] float32.
        dt_bias: [H] float32.
        decay: [T, H] float32, filled with -exp(a_log) * softplus(a + dt_bias).
        beta: [T, H] float32, filled with sigmoid(b).
    """
    for t in prange(a.shape[0]):
        for h in range(a.shape[1]):
            u = a[t, h] + dt_bias[h]
            if u <= SOFTPLUS_THRESHOLD:
                u = math.log(ONE + math.exp(u))
            decay[t, h] = -math.exp(a_log[h]) * u
            beta[t, h] = _sigmoid(b[t, h])


@njit(cache=True, parallel=True, nogil=True)
def gated_delta_rule(  # type: ignore[no-untyped-def]
    q, k, v, decay, beta, state, starts, read, write, out
):
    """The recurrence, token by token.

    Args:
        q: [T, HK, K] float32 that holds 16-bit values.
        k: [T, HK, K] the same.
        v: [T, HV, V] the same.
        decay: [T, HV] float32, from ``gates``.
        beta: [T, HV] float32, from ``gates``.
        state: [slots, HV, K, V] float32, read and written.
        starts: [S + 1] int64.
        read: [S] int64, the slot that holds each sequence's state before its first token.
        write: [T] int64, the slot that gets the state after each token, or -1 for none.
        out: [T, HV, V] float32, filled.
    """
    heads, size = v.shape[1], v.shape[2]
    shared = heads // k.shape[1]
    depth = k.shape[2]
    root = np.float32(1.0 / math.sqrt(depth))
    for unit in prange((starts.shape[0] - 1) * heads):
        sequence = unit // heads
        head = unit % heads
        source = head // shared
        # A copy: a later token may overwrite the slot it was read from.
        s = state[read[sequence], head].copy()
        key = np.empty(depth, np.float32)
        query = np.empty(depth, np.float32)
        update = np.empty(size, np.float32)
        y = np.empty(size, np.float32)
        for t in range(starts[sequence], starts[sequence + 1]):
            qq = np.float32(0.0)
            kk = np.float32(0.0)
            for i in range(depth):
                qq += q[t, source, i] * q[t, source, i]
                kk += k[t, source, i] * k[t, source, i]
            q_norm = ONE / math.sqrt(qq + EPSILON) * root
            k_norm = ONE / math.sqrt(kk + EPSILON)
            for i in range(depth):
                query[i] = q[t, source, i] * q_norm
                key[i] = k[t, source, i] * k_norm
            g = math.exp(decay[t, head])
            update[:] = np.float32(0.0)
            for i in range(depth):
                for j in range(size):
                    s[i, j] = s[i, j] * g
                    update[j] += s[i, j] * key[i]
            for j in range(size):
                update[j] = (v[t, head, j] - update[j]) * beta[t, head]
            y[:] = np.float32(0.0)
            for i in range(depth):
                for j in range(size):
                    s[i, j] += key[i] * update[j]
                    y[j] += s[i, j] * query[i]
            for j in range(size):
                out[t, head, j] = y[j]
            if write[t] >= 0:
                state[write[t], head] = s
