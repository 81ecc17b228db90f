"""Packing of 4-bit weights for the Triton kernel: one permutation, exact both ways.

The order of the values inside a word is that of ``kernels.int4_linear``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Columns are padded to a multiple of this, so that tiles of the common sizes need no mask.
COLUMNS = 64
#: Of 256 values, the two halves have one scale: the kernel's groups are of 128.
GROUPS = (32, 64, 128, 256)
#: What is unpacked at a time takes at most this part of a packed weight's bytes, or
#: ``LEAST_PIECE`` columns.
PIECES = 50
LEAST_PIECE = 2048


@dataclass(frozen=True)
class Int4Words:
    """A weight as the kernel reads it.

    Attributes:
        words: [groups, NP, group / 8] int32.
        scale: [groups, NP], the activations' dtype.
        offset: [groups, NP] int32, 1024 + z (fp16) or 128 + z (bf16) in both halves, or None for
            the symmetric 8.
        depth: K, before padding to whole groups.
        columns: N, before padding to NP.
        group: Values of k that share a scale.
    """

    words: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    depth: int
    columns: int
    group: int


def _bit_offsets(group: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For each k of a group, the word it is in and the bit at which it stands there."""
    k = torch.arange(group, device=device)
    low, lane, high, half, block = k & 1, (k >> 1) & 3, (k >> 3) & 1, (k >> 4) & 1, k >> 5
    return lane * (group // 32) + block, 16 * low + 8 * half + 4 * high


def pack_words(
    values: Callable[[int, int], torch.Tensor],
    depth: int,
    columns: int,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Int4Words:
    """Pack a weight, a piece of a group at a time: no unpacked copy of it ever exists.

    Args:
        values: Gives the integers 0..15 of k from first to last, [last - first, N], anywhere.
        depth: K.
        columns: N.
        scale: [K / group_size, N]; the packed weight is made on its device.
        zero: [K / group_size, N] integers 0..15, or None for the symmetric 8.
        group_size: 32, 64, 128, 256, or K for one scale a column.
        dtype: The activations' dtype, fp16 or bf16.

    Raises:
        ValueError: The group size is neither one of these nor K.
    """
    group = group_size
    if group_size == depth and group_size not in GROUPS:
        # One scale a column: the same scale for every 128 values of k.
        group = 128
        repeat = -(-depth // group)
        scale = scale.expand(repeat, columns)
        zero = None if zero is None else zero.expand(repeat, columns)
    elif group_size not in GROUPS or depth % group_size:
        raise ValueError(
            f"group size {group_size} is not covered for K={depth}: use 32, 64, 128, 256 or one "
            "scale a column"
        )
    elif group_size > 128:
        group = 128
        scale = scale.repeat_interleave(2, 0)
        zero = None if zero is None else zero.repeat_interleave(2, 0)
    groups, padded = -(-depth // group), -(-columns // COLUMNS) * COLUMNS
    device = scale.device
    word, bit = _bit_offsets(group, device)
    words = torch.zeros(groups, padded, group // 8, dtype=torch.int32, device=device)
    # Columns at a time: what is unpacked, three int32 a value, stays small beside the words.
    piece = max(LEAST_PIECE, words.nbytes // PIECES // (3 * 4 * group))
    for first in range(0, depth, group):
        part = values(first, min(first + group, depth))
        where, shift = word[: part.shape[0]], bit[: part.shape[0], None].int()
        for column in range(0, columns, piece):
            shifted = part[:, column : column + piece].to(device).to(torch.int32) << shift
            # Distinct bits: adding them up is joining them.
            words[first // group, column : min(column + piece, columns)].index_add_(
                1, where, shifted.t()
            )
    one = 0x6400 if dtype == torch.float16 else 0x4300
    offset = None
    if zero is not None:
        half = one + torch.nn.functional.pad(zero.to(torch.int32), (0, padded - columns))
        offset = (half | (half << 16)).contiguous()
    return Int4Words(
        words,
        torch.nn.functional.pad(scale.to(dtype), (0, padded - columns)).contiguous(),
        offset,
        depth,
        columns,
        group,
    )


def unpack_words(weight: Int4Words) -> torch.Tensor:
    """Inverse of ``pack_words``: [K, N] uint8."""
    word, bit = _bit_offsets(weight.group, weight.words.device)
    values = (weight.words[..., word] >> bit.int()) & 15
    flat = values.movedim(1, 2).flatten(0, 1)
    return flat[: weight.depth, : weight.columns].to(torch.uint8)
