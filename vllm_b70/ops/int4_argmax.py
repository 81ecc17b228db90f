"""``torch.ops.vllm_b70.int4_argmax``: a 4-bit weight's best column, without a row of logits.

It is for drafts, which decide no token. Which of two arithmetics serves is up to a device's tiles:
that of ``kernels.int4_linear`` where the rows are the left operand (XPU), else that of
``kernels.int4_draft``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_b70.ops import blocks, gemm, int4_gemm, library, split, tiles
from vllm_b70.ops.int4_words import Int4Words
from vllm_b70.ops.launcher import Launcher

#: The table of tiles; the K partition is that of ``int4_gemm``.
OP = "int4_argmax"
#: Rows that an offset's stride is a multiple of: no tile has more.
ROWS = 64


@functools.cache
def _rows_left(
    kernel: Any,
    tile: tiles.Tile,
    parts: int,
    group: int,
    dtype: torch.dtype,
    even_n: bool,
    block: bool,
    device: torch.device,
) -> Launcher:
    """The kernel of ``kernels.int4_linear``, with its constants."""
    return Launcher(
        kernel,
        int4_gemm.constants(tile, parts, group, dtype, even_n, block, device),
    )


@functools.cache
def _draft(
    prepare: Any,
    argmax: Any,
    best_of: Any,
    tile: tiles.Tile,
    parts: int,
    groups: int,
    group: int,
    dtype: torch.dtype,
    even_n: bool,
    ptx: bool,
    device: torch.device,
) -> tuple[Launcher, Launcher, Launcher]:
    """The kernels of ``kernels.int4_draft``, with their constants."""
    overlap = tiles.overlap_options(device)
    padded = 1 << (groups - 1).bit_length()
    constants = dict(
        PARTS=parts,
        GROUP=group,
        BN=tile.bn,
        BM=tile.bm,
        FP16=dtype == torch.float16,
        EVEN_N=even_n,
        PTX=ptx,
        AHEAD=tile.ahead if overlap["PDL"] else 0,
        **overlap,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
    return (
        Launcher(
            prepare,
            dict(
                GROUP=group, GROUPS=padded, PDL=overlap["PDL"], num_warps=8, enable_fp_fusion=False
            ),
        ),
        Launcher(argmax, constants),
        Launcher(best_of, dict(BLOCK=1024, num_warps=4) | overlap),
    )


def launch(
    x: torch.Tensor,
    weight: Int4Words,
    value: torch.Tensor,
    index: torch.Tensor,
    parts: int,
    tile: tiles.Tile,
    ptx: bool,
) -> None:
    """Run one tile choice; what ``int4_argmax`` does after choosing, and what the benchmark times.

    Args:
        x: [M, K], contiguous; K is whole groups.
        weight: Symmetric.
        value: [M] fp32, filled.
        index: [M] int64, filled.
        parts: The K partition.
        tile: The launch; ``left`` chooses the arithmetic, and its kernel's name does not matter.
        ptx: Use the packed PTX instructions instead of plain Triton; the same values.
    """
    column_tiles = -(-weight.columns // tile.bn)
    piece = split.rows_at_once(tile.bm, column_tiles)
    step = _launch_left if tile.left else _launch_draft
    for first in range(0, x.shape[0], piece):
        step(x[first : first + piece], weight, value[first:], index[first:], parts, tile, ptx)


def _launch_left(
    x: torch.Tensor,
    weight: Int4Words,
    value: torch.Tensor,
    index: torch.Tensor,
    parts: int,
    tile: tiles.Tile,
    ptx: bool,
) -> None:
    """``launch`` of rows that fit the workspace, where they are the left operand."""
    from vllm_b70.kernels import int4_linear as kernels
    from vllm_b70.kernels.linear import best_of

    groups, padded, _ = weight.words.shape
    rows, depth = x.shape
    column_tiles = -(-weight.columns // tile.bn)
    best = torch.empty((column_tiles, rows), dtype=torch.int64, device=x.device)
    launcher = _rows_left(
        kernels.argmax, tile, parts, weight.group, x.dtype, padded % tile.bn == 0, blocks.fits(x),
        x.device,
    )  # fmt: skip
    launcher(
        (-(-rows // tile.bm), column_tiles), (x, weight.words, weight.scale, best),
        rows, weight.columns, padded, depth, groups,
    )  # fmt: skip
    gemm.best_of(best_of)((rows,), (best, value, index), rows, column_tiles)


def _launch_draft(
    x: torch.Tensor,
    weight: Int4Words,
    value: torch.Tensor,
    index: torch.Tensor,
    parts: int,
    tile: tiles.Tile,
    ptx: bool,
) -> None:
    """``launch`` of rows that fit the workspace, where the weight is the left operand.

    Raises:
        ValueError: The tile's rows; of 8 Triton takes another matrix instruction of Hopper's.
    """
    from vllm_b70.kernels import int4_draft as kernels

    if not 16 <= tile.bm <= ROWS:
        raise ValueError(f"a tile of int4_argmax has 16 to {ROWS} rows, not {tile.bm}")
    groups, padded, _ = weight.words.shape
    rows, depth = x.shape
    column_tiles, stride = -(-weight.columns // tile.bn), -(-rows // ROWS) * ROWS
    half = torch.empty((rows, depth), dtype=torch.float16, device=x.device)
    offset = torch.empty((groups, stride), dtype=torch.float32, device=x.device)
    unit = torch.empty(rows, dtype=torch.float32, device=x.device)
    best = torch.empty((column_tiles, rows), dtype=torch.int64, device=x.device)
    # Scales are loaded in pairs.
    scale = weight.scale if weight.scale.data_ptr() % 4 == 0 else weight.scale.clone()
    prepare, argmax, best_of = _draft(
        kernels.prepare, kernels.argmax, kernels.best_of, tile, parts, groups, weight.group,
        x.dtype, padded % tile.bn == 0, ptx, x.device,
    )  # fmt: skip
    prepare((rows,), (x, half, offset, unit), rows, stride, depth, groups)
    argmax(
        (-(-rows // tile.bm), column_tiles), (half, weight.words, scale, offset, unit, best),
        rows, stride, weight.columns, padded, depth, groups,
    )  # fmt: skip
    best_of((rows,), (best, value, index), rows, column_tiles)


def parts_of(weight: Int4Words) -> int:
    """The K partition that ``int4_gemm`` takes for the weight."""
    groups = weight.words.shape[0]
    device = tiles.family(weight.words.device)
    return tiles.plan(int4_gemm.OP, device, weight.columns, weight.depth, groups).parts


def int4_argmax(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, columns: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and its lowest column, over a symmetric 4-bit weight.

    Logits are rounded to the dtype of x: columns whose logits are then equal tie, the lowest of
    them is taken, and a NaN counts as minus infinity. On an XPU they are those of ``int4_gemm``;
    elsewhere those of ``kernels.int4_draft``, which are as near to the exact ones.

    Args:
        x: [M, K] bf16 or fp16; K is a multiple of ``group``.
        words, scale: As in ``Int4Words``.
        columns: N.
        group: Values of k that share a scale.

    Returns:
        Values [M] fp32 and columns [M] int64.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    int4_gemm.check(x, words, scale, None, None, columns, group)
    rows, depth = x.shape
    if depth % group:
        raise ValueError(f"K={depth} is not a multiple of the group size {group}")
    value = torch.empty(rows, dtype=torch.float32, device=x.device)
    index = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        weight = Int4Words(words, scale, None, depth, columns, group)
        plan = tiles.plan(OP, tiles.family(x.device), columns, depth, words.shape[0])
        launch(
            x.contiguous(), weight, value, index, parts_of(weight), plan.tile(rows),
            ptx=x.device.type == "cuda",
        )  # fmt: skip
    return value, index


def _fake(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, columns: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    return x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.int64)


library.define(
    "int4_argmax(Tensor x, Tensor words, Tensor scale, int columns, int group) -> (Tensor, Tensor)",
    int4_argmax,
    _fake,
    devices=("CUDA", "XPU", "CPU"),
)
