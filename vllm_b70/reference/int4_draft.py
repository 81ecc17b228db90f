"""The argmax of 4-bit drafts where the weight is the matrix unit's left operand, written out.

    e[m]       = 14 less the exponent of the largest |x[m, k]|, at most 126
    h[m, k]    = x[m, k] * 2**e[m], rounded to fp16
    o[m, g]    = sum over k of group g of (72 if k & 8 else 1032) * h[m, k], exact, rounded to fp32
    p[m, n, g] = sum over k of group g, ascending, of ((64 if k & 8 else 1024) + q[k, n]) * h[m, k]
    acc[m, n]  = sum over the groups of a part, ascending, of (p - o) * scale[n]
    y[m, n]    = (sum over parts, ascending, of acc) * 2**-e[m], rounded to the dtype of x

Sums are fp32. A row with an infinity or a NaN has NaN alone. A device rounds the product with the
scale and its addition once, this and Triton's interpreter twice. On an XPU, whose rows are the left
operand, the argmax is ``reference.int4_linear.int4_argmax``.
"""

from __future__ import annotations

import torch

from vllm_b70.reference.linear import best


def prepare(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h [M, K] fp16, o [M, K / group_size] fp32, and 2**-e [M] fp32, of x [M, K] fp16 or bf16."""
    bits = x.float().view(torch.int32) & 0x7FFFFFFF
    exponent = bits.amax(1) >> 23
    finite = (exponent < 255)[:, None]
    field = torch.clamp(268 - exponent, max=253)
    h = (x.float() * (field << 23).view(torch.float32)[:, None]).half()
    high = (torch.arange(x.shape[1]) & 8) > 0
    # Times 2**24, an fp16 is an integer.
    whole = (torch.where(finite, h.float(), 0.0) * 2.0**24).long() * torch.where(high, 72, 1032)
    o = whole.unflatten(1, (-1, group_size)).sum(2).float() * 2.0**-24
    return h, torch.where(finite, o, float("nan")), ((254 - field) << 23).view(torch.float32)


def int4_draft(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group_size: int, parts: int = 1
) -> torch.Tensor:
    """The logits that the argmax is taken of.

    Args:
        x: [M, K] fp16 or bf16.
        q: [K, N] uint8, the unsigned 4-bit values 0..15, whose zero point is 8.
        scale: [K / group_size, N] floating point.
        group_size: Values of k that share a scale; it divides K, and 32 divides it.
        parts: The K partition: part i holds the groups from i * groups // parts on.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    h, o, unit = prepare(x, group_size)
    groups = x.shape[1] // group_size
    out = None
    for part in range(parts):
        acc = torch.zeros(x.shape[0], q.shape[1])
        for group in range(part * groups // parts, (part + 1) * groups // parts):
            p = torch.zeros_like(acc)
            for k in range(group * group_size, (group + 1) * group_size):
                p = p + h[:, k, None].float() * (q[k].float() + (64 if k & 8 else 1024))
            acc = acc + (p - o[:, group, None]) * scale[group].float()
        out = acc if out is None else out + acc
    assert out is not None
    return (out * unit[:, None]).to(x.dtype)


def int4_argmax(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group_size: int, parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of a row of ``int4_draft``, [M] fp32, and its lowest column, [M] int64; a NaN is
    minus infinity. Args: as for ``int4_draft``."""
    return best(int4_draft(x, q, scale, group_size, parts))
