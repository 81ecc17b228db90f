"""Causal attention with one partition of the keys, written out.

The keys of a sequence are cut every ``part`` positions from position 0, a part every ``tile``. For
each query row, in fp32 and with every sum in ascending order:

    a tile:  s = (sum over d of q * k) * scale * log2(e)
             top = max(m, s);  p = round(2 ** (s - top))
             total = total * 2 ** (m - top) + sum of p
             acc   = acc * 2 ** (m - top) + sum of p * v
    a part:  m, total, acc over its tiles, from minus infinity and zeros
    a row:   parts merged in index order; out = round(acc * (1 / total))

p is rounded to the dtype of q. A matrix unit adds 16 products at a time in an order of its own.
"""

from __future__ import annotations

import math

import torch


def _exp2(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(x.double()).float()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    part: int,
    tile: int,
) -> torch.Tensor:
    """The rows of one query token over the keys that it sees.

    Args:
        q: [HQ, D] fp16 or bf16.
        k: [N, H, D], the keys up to the token's position; H divides HQ.
        v: [N, H, D].
        scale: Of the scores.
        part: Keys of a part.
        tile: Keys of a tile; it divides ``part``.

    Returns:
        [HQ, D] in the dtype of ``q``; zeros if N is 0.
    """
    group = q.shape[0] // k.shape[1]
    queries = q.float()
    keys = k.float().repeat_interleave(group, 1)
    values = v.float().repeat_interleave(group, 1)
    score = torch.tensor(scale * math.log2(math.e), dtype=torch.float32)
    nothing = torch.full((q.shape[0],), -math.inf)
    whole = (nothing, torch.zeros(q.shape[0]), torch.zeros(q.shape))
    for begin in range(0, k.shape[0], part):
        m, total, acc = nothing, torch.zeros(q.shape[0]), torch.zeros(q.shape)
        end = min(begin + part, k.shape[0])
        for first in range(begin, end, tile):
            its_keys = keys[first : min(first + tile, end)]
            s = torch.zeros(its_keys.shape[:2])
            for d in range(q.shape[1]):
                s = s + queries[:, d] * its_keys[:, :, d]
            s = s * score
            top = torch.maximum(m, s.max(0).values)
            keep = _exp2(m - top)
            p = _exp2(s - top).to(q.dtype).float()
            total, acc, m = total * keep, acc * keep[:, None], top
            for i in range(p.shape[0]):
                total = total + p[i]
                acc = acc + p[i, :, None] * values[first + i]
        whole = merge(*whole, m, total, acc)
    inverse = torch.where(whole[1] == 0, 0.0, 1.0 / whole[1])
    return (whole[2] * inverse[:, None]).to(q.dtype)


def merge(
    m: torch.Tensor,
    total: torch.Tensor,
    acc: torch.Tensor,
    part_m: torch.Tensor,
    part_total: torch.Tensor,
    part_acc: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add one part to the parts before it.

    Args:
        m, part_m: [R] fp32, the largest score.
        total, part_total: [R] fp32, the sum of weights.
        acc, part_acc: [R, D] fp32, the weighted sum of values.

    Returns:
        The three of both.
    """
    top = torch.maximum(m, part_m)
    old, new = _exp2(m - top), _exp2(part_m - top)
    return top, total * old + part_total * new, acc * old[:, None] + part_acc * new[:, None]


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    starts: list[int],
    lengths: list[int],
    scale: float,
    part: int,
    tile: int,
) -> torch.Tensor:
    """Attention of a batch over a paged cache, one query token at a time.

    Args:
        q: [T, HQ, D].
        k, v: [blocks, block size, H, D].
        table: [S, ...], the blocks of each sequence.
        starts: S + 1 starts of the sequences' queries.
        lengths: S positions after each sequence's last query.
        scale, part, tile: As in ``attend``.

    Returns:
        [T, HQ, D]; zeros for rows that belong to no sequence or see no key.
    """
    out = torch.zeros_like(q)
    size = k.shape[1]
    for sequence, length in enumerate(lengths):
        first, last = starts[sequence], starts[sequence + 1]
        for token in range(first, last):
            seen = length - (last - token) + 1
            if seen <= 0:
                continue
            position = torch.arange(seen)
            block = table[sequence, position // size].long()
            keys, values = k[block, position % size], v[block, position % size]
            out[token] = attend(q[token], keys, values, scale, part, tile)
    return out
