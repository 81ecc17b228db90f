"""W4A16 linear: the one INT4 arithmetic, written out.

    group[m, n] = sum over k of a group, ascending, of (q[k, n] - z[n]) * x[m, k]     fp32
    part[m, n]  = sum over the groups of a part, ascending, of group[m, n] * scale[n] fp32
    y[m, n]     = sum over the parts, ascending                                       fp32
    out         = round(y + bias)                                                     once

The K partition, the number of parts, belongs to the weight: the CPU uses one part, a GPU as many as
its table says for the weight's shape. It never follows the row count.

The product of a 4-bit integer and a 16-bit float is exact in fp32, so whether it is fused with the
addition cannot show. The multiplication by the scale and the addition that follows are two
roundings and must never be fused.
"""

from __future__ import annotations

import torch

from vllm_b70.reference.linear import best


def int4_linear(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    parts: int = 1,
) -> torch.Tensor:
    """Linear layer over 4-bit weights.

    Args:
        x: [M, K] fp16 or bf16.
        q: [K, N] uint8, the unsigned 4-bit values 0..15.
        scale: [K / group_size, N] floating point.
        zero: [K / group_size, N] uint8 zero points, or None for the symmetric 8.
        bias: [N] or None; added in fp32 before the one rounding.
        group_size: Values of k that share a scale; it divides K.
        parts: The K partition: part i holds the groups from i * groups // parts on.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    rows, depth = x.shape
    x32 = x.float()
    groups = depth // group_size
    out = None
    for part in range(parts):
        acc = torch.zeros(rows, q.shape[1], dtype=torch.float32)
        for group in range(part * groups // parts, (part + 1) * groups // parts):
            zeros = zero[group].float() if zero is not None else torch.tensor(8.0)
            total = torch.zeros_like(acc)
            for k in range(group * group_size, (group + 1) * group_size):
                total = total + x32[:, k, None] * (q[k].float() - zeros)
            acc = acc + total * scale[group].float()
        out = acc if out is None else out + acc
    assert out is not None
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def int4_argmax(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    parts: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of a row of ``int4_linear`` and its lowest column; a NaN is minus infinity.

    What a draft of an XPU is; other devices' have the arithmetic of ``reference.int4_draft``.

    Args: as for ``int4_linear``.

    Returns:
        Values [M] fp32 and columns [M] int64.
    """
    return best(int4_linear(x, q, scale, zero, bias, group_size, parts))
