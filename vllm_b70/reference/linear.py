"""16-bit linear: fp32 accumulation in ascending k, part by part, one rounding.

    part[m, n] = sum over k of a part, ascending, of x[m, k] * weight[n, k]     fp32
    y[m, n]    = sum over the parts, ascending                                  fp32
    out        = round(y + bias)                                                once

The K partition belongs to the weight and never follows the row count: the CPU uses one part, a GPU
as many as its table says for the weight's shape. The product of two 16-bit floats is exact in fp32,
so fusing it with the addition cannot show.
"""

from __future__ import annotations

import torch

#: Values of k that no part cuts.
UNIT = 128


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int = 1
) -> torch.Tensor:
    """Linear layer over 16-bit weights.

    Args:
        x: [M, K] fp16 or bf16.
        weight: [N, K], the dtype of ``x``.
        bias: [N] or None; added in fp32 before the one rounding.
        parts: The K partition: of K's units of 128, part i holds those from i * units // parts on.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    x32, w32 = x.float(), weight.float()
    depth = x.shape[1]
    units = -(-depth // UNIT)
    out = None
    for part in range(parts):
        acc = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
        first, last = part * units // parts, (part + 1) * units // parts
        for k in range(first * UNIT, min(last * UNIT, depth)):
            acc = acc + x32[:, k, None] * w32[:, k]
        out = acc if out is None else out + acc
    assert out is not None
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def linear_argmax(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of a row of ``linear`` and its lowest column; a NaN counts as minus infinity.

    Args:
        x, weight, bias, parts: As for ``linear``.

    Returns:
        Values [M] fp32 and columns [M] int64.
    """
    return best(linear(x, weight, bias, parts))


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row, [M] fp32, and its lowest column; a NaN counts as minus infinity."""
    logits = logits.float()
    logits = torch.where(logits.isnan(), float("-inf"), logits)
    columns = [(row == row.max()).nonzero()[0, 0] for row in logits]
    index = torch.stack(columns) if columns else torch.zeros(0, dtype=torch.int64)
    return logits.gather(1, index[:, None])[:, 0], index
