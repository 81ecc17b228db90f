"""``torch.ops.vllm_b70.gated_rms_norm``: the norm at the end of a gated-delta-net layer."""

from __future__ import annotations

import numpy as np
import torch

from vllm_b70.ops import library


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, epsilon: float, sigmoid_only: bool
) -> torch.Tensor:
    """Gated RMS norm whose row depends on that row alone.

    Args:
        x: [..., D] bf16 or fp16.
        z: the shape and dtype of ``x``.
        weight: [D].
        epsilon: Added to the mean square.
        sigmoid_only: The gate is sigmoid(z), else silu(z).

    Returns:
        As ``x``; the arithmetic is in ``reference.norm``.

    Raises:
        ValueError: The shapes differ.
    """
    if x.shape != z.shape or weight.shape != x.shape[-1:]:
        raise ValueError(f"x {(*x.shape,)}, z {(*z.shape,)}, weight {(*weight.shape,)} do not fit")
    library.start_numba()
    from vllm_b70.cpu.norm import gated_rms_norm as run

    rows = (-1, x.shape[-1])
    out = torch.empty(x.reshape(rows).shape, dtype=torch.float32)
    run(
        x.reshape(rows).float().contiguous().numpy(),
        z.reshape(rows).float().contiguous().numpy(),
        weight.float().numpy(),
        np.float32(epsilon),
        sigmoid_only,
        out.numpy(),
    )
    return out.to(x.dtype).view(x.shape)


def _fake(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, epsilon: float, sigmoid_only: bool
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


library.define(
    "gated_rms_norm(Tensor x, Tensor z, Tensor weight, float epsilon, bool sigmoid_only) -> Tensor",
    gated_rms_norm,
    _fake,
)
