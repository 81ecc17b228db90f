"""Gated RMS norm: x / sqrt(mean(x * x) + epsilon) * weight * act(z), in fp32, one rounding."""

from __future__ import annotations

import torch


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
