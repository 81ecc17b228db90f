"""``torch.ops.vllm_b70.int4_argmax``: a 4-bit weight's best column, without a row of logits."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_b70.ops import blocks, gemm, int4_gemm, library, split, tiles
from vllm_b70.ops.int4_words import Int4Words
from vllm_b70.ops.launcher import Launcher

#: The table of tiles; the K partition is that of ``int4_gemm``, so that both have the same logits.
OP = "int4_argmax"


@functools.cache
def _launcher(
    kernel: Any,
    tile: tiles.Tile,
    parts: int,
    group: int,
    dtype: torch.dtype,
    even_n: bool,
    ptx: bool,
    block: bool,
    device: torch.device,
) -> Launcher:
    """The kernel that multiplies, with its constants."""
    return Launcher(
        kernel,
        dict(
            PARTS=parts,
            GROUP=group,
            STEP=min(tile.step or group, group),
            BN=tile.bn,
            BM=tile.bm,
            FP16=dtype == torch.float16,
            EVEN_N=even_n,
            PTX=ptx,
            LEFT=tile.left,
            BLOCK=block,
            UNROLL=tile.unroll,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
            **tiles.backend_options(tile, device),
        ),
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
        tile: The launch; its kernel's name does not matter.
        ptx: Use the packed PTX instructions instead of plain Triton; the same values.
    """
    from vllm_b70.kernels import int4_linear as kernels
    from vllm_b70.kernels.linear import best_of

    groups, padded, _ = weight.words.shape
    column_tiles = -(-weight.columns // tile.bn)
    piece = split.rows_at_once(tile.bm, column_tiles)
    for first in range(0, x.shape[0], piece):
        rows = x[first : first + piece]
        count, depth = rows.shape
        best = torch.empty((column_tiles, count), dtype=torch.int64, device=x.device)
        launcher = _launcher(
            kernels.argmax, tile, parts, weight.group, x.dtype, padded % tile.bn == 0, ptx,
            tile.left and blocks.fits(rows), x.device,
        )  # fmt: skip
        launcher(
            (-(-count // tile.bm), column_tiles), (rows, weight.words, weight.scale, best),
            count, weight.columns, padded, depth, groups,
        )  # fmt: skip
        gemm.best_of(best_of)((count,), (best, value[first:], index[first:]), count, column_tiles)


def parts_of(weight: Int4Words) -> int:
    """The K partition that ``int4_gemm`` takes for the weight."""
    groups = weight.words.shape[0]
    device = tiles.family(weight.words.device)
    return tiles.plan(int4_gemm.OP, device, weight.columns, weight.depth, groups).parts


def int4_argmax(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, columns: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and its lowest column, over a symmetric 4-bit weight.

    As ``argmax`` over ``int4_gemm``'s result: columns tie when their logits round to one value, the
    lowest of them is taken, and a NaN counts as minus infinity.

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
