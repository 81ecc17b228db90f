"""A 16-bit weight made into a 4-bit one at load, some rows at a time: memory stays bounded.

Symmetric, rounded to the nearest step, one scale a group: the convention of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_b70.checkpoints.pack import QuantizedWeight, quantize
from vllm_b70.ops.int4_linear import pack_int4
from vllm_b70.ops.int4_words import COLUMNS, Int4Words, pack_words

#: Rows of the weight, that is columns of the product, that are quantised at a time; a multiple of
#: ``int4_words.COLUMNS``.
PIECE = 2048


def _count(weight: torch.Tensor, rows: torch.Tensor | None) -> int:
    return weight.shape[0] if rows is None else rows.shape[0]


def _pieces(
    weight: torch.Tensor, rows: torch.Tensor | None, group: int
) -> Iterator[tuple[int, QuantizedWeight]]:
    for first in range(0, _count(weight, rows), PIECE):
        last = first + PIECE
        piece = weight[first:last] if rows is None else weight[rows[first:last]]
        yield first, quantize(piece, group, scale_dtype=weight.dtype)


def quantise_words(weight: torch.Tensor, rows: torch.Tensor | None, group: int) -> Int4Words:
    """The weight as ``int4_gemm`` reads it, on its own device.

    Args:
        weight: [N, K] bf16 or fp16; it is only read.
        rows: [n] integers, the rows to take in this order, or None for all.
        group: Values of k that share a scale; it divides K.

    Raises:
        ValueError: The group does not divide K, or a value is not finite.
    """
    columns, depth = _count(weight, rows), weight.shape[1]
    padded = -(-columns // COLUMNS) * COLUMNS
    words = scale = None
    unit = group
    for first, piece in _pieces(weight, rows, group):
        codes = piece.codes.t()

        def values(first: int, last: int, codes: torch.Tensor = codes) -> torch.Tensor:
            return codes[first:last]

        packed = pack_words(
            values, depth, codes.shape[1], piece.scales.t(), None, group, weight.dtype
        )
        if words is None or scale is None:
            unit = packed.group
            groups = packed.words.shape[0]
            words = packed.words.new_empty(groups, padded, packed.words.shape[2])
            scale = packed.scale.new_empty(groups, padded)
        last = first + packed.words.shape[1]
        words[:, first:last], scale[:, first:last] = packed.words, packed.scale
    assert words is not None and scale is not None, "a weight without rows"
    return Int4Words(words, scale, None, depth, columns, unit)


def quantise_nibbles(
    weight: torch.Tensor, rows: torch.Tensor | None, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight as ``int4_linear`` reads it: [ceil(K / 2), N] uint8 and the scales [K / group, N]
    fp32. Arguments and errors as in ``quantise_words``."""
    columns, depth = _count(weight, rows), weight.shape[1]
    nibbles = torch.empty((depth + 1) // 2, columns, dtype=torch.uint8)
    # vLLM loads models under another default dtype.
    scale = torch.empty(depth // group, columns, dtype=torch.float32)
    for first, piece in _pieces(weight, rows, group):
        last = first + piece.codes.shape[0]
        nibbles[:, first:last] = pack_int4(piece.codes.t())
        scale[:, first:last] = piece.scales.t()
    return nibbles, scale
