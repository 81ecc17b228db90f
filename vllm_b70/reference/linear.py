"""16-bit linear: fp32 accumulation in ascending k, one rounding.

The product of two 16-bit floats is exact in fp32, so fusing it with the addition cannot show.
"""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Linear layer over 16-bit weights.

    Args:
        x: [M, K] fp16 or bf16.
        weight: [N, K], the dtype of ``x``.
        bias: [N] or None; added in fp32 before the one rounding.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    x32, w32 = x.float(), weight.float()
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
    for k in range(x.shape[1]):
        out = out + x32[:, k, None] * w32[:, k]
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)
