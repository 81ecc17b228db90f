"""Norms over the last dimension: x * rsqrt(mean(x * x) + epsilon) * weight * gate, one rounding.

The CPU's gated norm adds a row's squares in ascending order; on a GPU one tree of additions serves
every norm. The tree is written out here, the CPU's order is not.
"""

from __future__ import annotations

import torch

#: Values of a row that the tree keeps while it adds halves to one another; below, neighbours.
TREE = 1024


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, epsilon: float, activation: str
) -> torch.Tensor:
    """Norm over the last dimension, then the gate.

    Args:
        x: [R, D] fp16 or bf16.
        z: [R, D] the same.
        weight: [D].
        epsilon: Added to the mean square.
        activation: ``silu`` (``swish``) or ``sigmoid``, of z.

    Returns:
        [R, D] in the dtype of ``x``.
    """
    x32, z32 = x.float(), z.float()
    gate = torch.sigmoid(z32)
    if activation != "sigmoid":
        gate = z32 * gate
    normed = x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + epsilon)
    return (normed * weight.float() * gate).to(x.dtype)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, two values at a time.

    Args:
        x: [..., D] fp32; zeros fill D up to a power of two.

    Returns:
        [..., 1] fp32.
    """
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:] if 2 * size > TREE else x[..., ::2] + x[..., 1::2]
    return x


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x) in fp32, both rounded correctly; torch's own fp32 square root is not always."""
    return 1.0 / x.double().sqrt().float()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, offset: float = 0.0
) -> torch.Tensor:
    """RMS norm over the last dimension.

    Args:
        x: [..., D] floating point.
        weight: [D] or None.
        epsilon: Added to the mean square.
        offset: Added to the weight in fp32: 1 for Gemma's norm.

    Returns:
        [..., D] in the dtype of ``x``.
    """
    x32 = x.float()
    y = x32 * rsqrt(tree_sum(x32 * x32) / x.shape[-1] + epsilon)
    if weight is not None:
        y = y * (weight.float() + offset)
    return y.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual, round, and norm what the rounding left.

    Args:
        x: [..., D] floating point.
        residual: As ``x``.
        weight, epsilon, offset: As in ``rms_norm``.

    Returns:
        The norm and the sum, both as ``x``.
    """
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, epsilon, offset), total


def l2_norm(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x * rsqrt(sum(x * x) + epsilon) over the last dimension.

    Args:
        x: [..., D] floating point.
        epsilon: Added to the sum of squares.

    Returns:
        [..., D] in the dtype of ``x``.
    """
    x32 = x.float()
    return (x32 * rsqrt(tree_sum(x32 * x32) + epsilon)).to(x.dtype)
