"""W4A16 linear: the one INT4 arithmetic, written out.

    part[m, n] = sum over k of a group, ascending, of (q[k, n] - z[n]) * x[m, k]     fp32
    y[m, n]    = sum over groups, ascending, of part[m, n] * scale[n]                fp32
    out        = round(y + bias)                                                     once

The product of a 4-bit integer and a 16-bit float is exact in fp32, so whether it is fused with the
addition cannot show. The multiplication by the scale and the addition that follows are two
roundings and must never be fused.
"""

from __future__ import annotations

import torch


def int4_linear(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """Linear layer over 4-bit weights.

    Args:
        x: [M, K] fp16 or bf16.
        q: [K, N] uint8, the unsigned 4-bit values 0..15.
        scale: [K / group_size, N] floating point.
        zero: [K / group_size, N] uint8 zero points, or None for the symmetric 8.
        bias: [N] or None; added in fp32 before the one rounding.
        group_size: Values of k that share a scale; it divides K.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    rows, depth = x.shape
    x32 = x.float()
    out = torch.zeros(rows, q.shape[1], dtype=torch.float32)
    for group in range(depth // group_size):
        zeros = zero[group].float() if zero is not None else torch.tensor(8.0)
        part = torch.zeros_like(out)
        for k in range(group * group_size, (group + 1) * group_size):
            part = part + x32[:, k, None] * (q[k].float() - zeros)
        out = out + part * scale[group].float()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)
