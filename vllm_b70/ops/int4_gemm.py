"""``torch.ops.vllm_b70.int4_gemm``: the W4A16 linear layer on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_b70.ops import blocks, hopper, library, split, tiles
from vllm_b70.ops.checks import check_bias, check_rows
from vllm_b70.ops.int4_words import Int4Words
from vllm_b70.ops.launcher import Launcher

OP = "int4_linear"
#: Smallest tile of a kernel that counts finished parts.
LEAST_BN, LEAST_BM = 64, 8


def counters(columns: int) -> int:
    """Size of the ``done`` buffer of a weight; see ``split.counters``."""
    return split.counters(columns, LEAST_BN, LEAST_BM)


def constants(
    tile: tiles.Tile,
    parts: int,
    group: int,
    dtype: torch.dtype,
    even_n: bool,
    block: bool,
    device: torch.device,
) -> dict[str, Any]:
    """What every kernel of ``kernels.int4_linear`` is compiled for, and the compiler's options."""
    return dict(
        PARTS=parts,
        GROUP=group,
        STEP=min(tile.step or group, group),
        BN=tile.bn,
        BM=tile.bm,
        FP16=dtype == torch.float16,
        EVEN_N=even_n,
        BLOCK=block,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
        **tiles.backend_options(tile, device),
    )


@functools.cache
def _launcher(
    kernel: Any,
    tile: tiles.Tile,
    parts: int,
    group: int,
    dtype: torch.dtype,
    asymmetric: bool,
    bias: bool,
    even_n: bool,
    even_k: bool,
    ptx: bool,
    block: bool,
    device: torch.device,
) -> Launcher:
    """A kernel of ``kernels.int4_linear`` that multiplies, with its constants."""
    overlap = tiles.overlap_options(device, tile.overlap)
    return Launcher(
        kernel,
        dict(
            ASYMMETRIC=asymmetric,
            BIAS=bias,
            EVEN_K=even_k,
            PTX=ptx,
            LEFT=tile.left,
            AHEAD=tile.ahead if overlap["PDL"] else 0,
            **overlap,
            **constants(tile, parts, group, dtype, even_n, block, device),
        ),
    )


def launch(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    done: torch.Tensor,
    out: torch.Tensor,
    group: int,
    parts: int,
    tile: tiles.Tile,
    ptx: bool,
) -> None:
    """Run one tile; what ``int4_gemm`` does after choosing, and what the benchmark times.

    Args:
        x: [M, K], contiguous.
        words, scale, offset, group: As in ``Int4Words``.
        bias: [N] or None.
        done: From ``counters``.
        out: [M, N], filled.
        parts: The K partition.
        tile: The launch.
        ptx: Use the packed PTX instructions instead of plain Triton; the same values.

    Raises:
        ValueError: The tile is for Hopper and cannot serve this call; ``choose`` names no such one.
    """
    if tile.kernel == "hopper":
        if group != hopper.GROUP:
            raise ValueError(f"the Hopper kernel has no groups of {group}")
        return hopper.launch(x, words, scale, offset, bias, done, out, parts, tile)
    from vllm_b70.kernels import int4_linear as kernels

    rows, depth = x.shape
    columns = out.shape[1]
    groups, padded, _ = words.shape
    row_tiles, column_tiles = -(-rows // tile.bm), -(-columns // tile.bn)
    launcher = _launcher(
        kernels.split if tile.kernel == "split" else kernels.walk, tile, parts, group, x.dtype,
        offset is not None, bias is not None, padded % tile.bn == 0, depth % group == 0, ptx,
        tile.left and blocks.fits(x), x.device,
    )  # fmt: skip
    offsets = words if offset is None else offset
    biases = scale if bias is None else bias
    if tile.kernel == "split":
        partial = torch.empty(
            parts * rows * columns if parts > 1 else 1, dtype=torch.float32, device=x.device
        )
        launcher(
            (column_tiles, parts, row_tiles),
            (x, words, scale, offsets, biases, partial, done, out),
            rows, columns, padded, depth, groups,
        )  # fmt: skip
    else:
        launcher(
            (row_tiles, column_tiles), (x, words, scale, offsets, biases, out),
            rows, columns, padded, depth, groups,
        )  # fmt: skip


def choose(
    tile: tiles.Tile, x: torch.Tensor, words: torch.Tensor, columns: int, group: int, parts: int
) -> tiles.Tile:
    """The table's tile, or where it cannot serve this call a walk of its size: the same bits.

    Args:
        tile: From the table.
        x: [M, K], contiguous.
        words, group: As in ``Int4Words``.
        columns: N.
        parts: The K partition.
    """
    if tile.kernel == "split":
        serves = split.fits(parts, x.shape[0], columns)
    elif tile.kernel == "hopper":
        serves = hopper.fits(x, words, group, parts)
    else:
        serves = True
    return tile if serves else tiles.replace(tile, kernel="walk")


def int4_gemm(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    done: torch.Tensor,
    columns: int,
    group: int,
    parts: int,
) -> torch.Tensor:
    """W4A16 linear whose row m depends on row m of ``x``, the weights and ``parts`` alone.

    Args:
        x: [M, K] bf16 or fp16.
        words, scale, offset: As in ``Int4Words``.
        bias: [N] or None.
        done: int32 zeros, from ``counters``; zero again afterwards.
        columns: N.
        group: Values of k that share a scale.
        parts: The K partition; 0 takes the table's.

    Returns:
        [M, N] in the dtype of ``x``; the arithmetic is in ``reference.int4_linear``.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check(x, words, scale, offset, bias, columns, group)
    rows, depth = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    plan = tiles.plan(OP, tiles.family(x.device), columns, depth, words.shape[0])
    parts = parts or plan.parts
    x = x.contiguous()
    tile = choose(plan.tile(rows), x, words, columns, group, parts)
    launch(
        x, words, scale, offset, bias, done, out, group, parts, tile,
        ptx=x.device.type == "cuda",
    )  # fmt: skip
    return out


def check(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    columns: int,
    group: int,
) -> None:
    """Raise unless the arguments of ``int4_gemm`` fit one another.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_rows(x)
    groups, padded = -(-x.shape[1] // group), -(-columns // 64) * 64
    if words.dtype != torch.int32 or words.shape != (groups, padded, group // 8):
        raise ValueError(
            f"words must be int32 {(groups, padded, group // 8)}, "
            f"not {words.dtype} {(*words.shape,)}"
        )
    if scale.dtype != x.dtype or scale.shape != (groups, padded):
        raise ValueError(
            f"scale must be {x.dtype} {(groups, padded)}, not {scale.dtype} {(*scale.shape,)}"
        )
    if offset is not None and (offset.dtype != torch.int32 or offset.shape != scale.shape):
        raise ValueError(f"offset must be int32 {(*scale.shape,)}, not {(*offset.shape,)}")
    check_bias(bias, columns)


def apply(
    x: torch.Tensor, weight: Int4Words, bias: torch.Tensor | None, done: torch.Tensor, parts: int
) -> torch.Tensor:
    """``int4_gemm`` on a packed weight."""
    return int4_gemm(
        x, weight.words, weight.scale, weight.offset, bias, done,
        weight.columns, weight.group, parts,
    )  # fmt: skip


def _fake(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    done: torch.Tensor,
    columns: int,
    group: int,
    parts: int,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], columns))


library.define(
    "int4_gemm(Tensor x, Tensor words, Tensor scale, Tensor? offset, Tensor? bias, "
    "Tensor(a!) done, int columns, int group, int parts) -> Tensor",
    int4_gemm,
    _fake,
    devices=("CUDA", "XPU", "CPU"),
)
