"""``torch.ops.vllm_b70.gemm`` and ``gemm_argmax``: the 16-bit linear layer on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_b70.ops import blocks, library, split, tiles
from vllm_b70.ops.checks import check_bias, check_rows
from vllm_b70.ops.launcher import Launcher
from vllm_b70.reference.linear import UNIT

OP = "linear"
#: Column and row tile of the smallest launch that counts finished parts.
LEAST_BN, LEAST_BM = 16, 8
#: Rows whose tile serves the argmax of more rows too: ranking needs registers that a larger tile
#: has not got.
ARGMAX_ROWS = 64


def counters(columns: int) -> int:
    """Size of the ``done`` buffer of a weight; see ``split.counters``."""
    return split.counters(columns, LEAST_BN, LEAST_BM)


def plan(device: torch.device, columns: int, depth: int) -> tiles.Plan:
    """The table's plan for a weight, [N, K]."""
    return tiles.plan(OP, tiles.family(device), columns, depth, -(-depth // UNIT))


def parts_of(weight: torch.Tensor) -> int:
    """The K partition that ``gemm`` takes for a weight, [N, K]: for a call on a piece of it."""
    return plan(weight.device, *weight.shape).parts


def _describable(tensor: torch.Tensor) -> bool:
    """Whether the tensor memory unit takes it: 16-byte aligned rows."""
    return tensor.data_ptr() % 16 == 0 and tensor.shape[1] * tensor.element_size() % 16 == 0


def _rectangles(x: torch.Tensor, weight: torch.Tensor, tile: tiles.Tile) -> bool:
    """Whether a kernel loads rectangles of its operands: by descriptors, or blocks of pointers."""
    possible = blocks.fits if x.device.type == "xpu" else _describable
    return tile.tensor and possible(x) and possible(weight)


def _descriptors(kind: str, tile: tiles.Tile) -> dict[int, tuple[Any, ...]]:
    """The operands that a kernel takes as descriptors, as ``Launcher`` wants it."""
    from vllm_b70.kernels.blocks import POINTERS

    if POINTERS:
        return {}  # the kernel makes blocks of them
    from triton.tools.tensor_descriptor import TensorDescriptor

    heights = [tile.bm, tile.bn, tile.bn // 2] if kind == "wide" else [tile.bm, tile.bn]
    return {i: (TensorDescriptor.from_tensor, [n, tile.bk]) for i, n in enumerate(heights)}


@functools.cache
def _launcher(
    kernel: Any,
    kind: str,
    tile: tiles.Tile,
    parts: int,
    dtype: torch.dtype,
    bias: bool,
    even_k: bool,
    tensor: bool,
    device: torch.device,
) -> Launcher:
    """A kernel of ``kernels.linear`` or ``linear_wide`` that multiplies, with its constants.

    Args:
        kernel: The kernel.
        kind: ``split``, ``walk``, ``wide`` or ``argmax``.
        tile: The launch.
        parts: The K partition.
        dtype: Of the operands.
        bias: Whether there is one.
        even_k: Whether K is a multiple of ``UNIT``.
        tensor: Whether it loads rectangles of the operands.
        device: Where it runs.

    Raises:
        ValueError: The tile's steps of k would cross the border of a part.
    """
    if UNIT % tile.bk:
        raise ValueError(
            f"a tile has a step of {tile.bk} values of k, but parts begin at multiples of {UNIT}: "
            "use a step that divides it"
        )
    constants: dict[str, Any] = dict(
        PARTS=parts,
        BN=tile.bn,
        BM=tile.bm,
        BK=tile.bk,
        BIAS=bias,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
        **tiles.backend_options(tile, device),
    )
    if kind != "wide":
        constants |= {"SWAP": tile.swap, "TENSOR": tensor, "EVEN_K": even_k}
    if kind in ("walk", "wide"):
        constants["FLATTEN"] = tile.persistent
    if kind == "argmax":
        import triton.language as tl

        constants["DTYPE"] = tl.float16 if dtype == torch.float16 else tl.bfloat16
    else:
        overlap = tiles.overlap_options(device, tile.overlap)
        constants |= overlap | {"AHEAD": tile.ahead if overlap["PDL"] else 0}
    return Launcher(kernel, constants, _descriptors(kind, tile) if tensor else None)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    done: torch.Tensor,
    out: torch.Tensor,
    parts: int,
    tile: tiles.Tile,
) -> None:
    """Run one tile choice; what ``gemm`` does after choosing, and what the benchmark times.

    Args:
        x: [M, K], contiguous.
        weight: [N, K], contiguous.
        bias: [N] or None.
        done: From ``counters``.
        out: [M, N], filled.
        parts: The K partition.
        tile: The launch.
    """
    from vllm_b70.kernels import linear as kernels

    rows, depth = x.shape
    columns = weight.shape[0]
    row_tiles, column_tiles = -(-rows // tile.bm), -(-columns // tile.bn)
    tensor = _rectangles(x, weight, tile)
    given = (parts, x.dtype, bias is not None, depth % UNIT == 0, tensor, x.device)
    biases = weight if bias is None else bias
    if tile.kernel == "split":
        size = parts * rows * columns if parts > 1 else 1
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        _launcher(kernels.split, "split", tile, *given)(
            (column_tiles, parts, row_tiles), (x, weight, weight, biases, partial, done, out),
            rows, columns, depth,
        )  # fmt: skip
        return
    wide = tile.kernel == "wide" and tensor
    if wide:
        column_tiles = -(-columns // (3 * tile.bn // 2))
    programs = row_tiles * column_tiles
    if tile.persistent:
        programs = min(programs, tiles.processors(x.device))
    if not wide:
        launcher, operands = _launcher(kernels.walk, "walk", tile, *given), [x, weight, weight]
    else:
        from vllm_b70.kernels import linear_wide

        launcher = _launcher(linear_wide.walk, "wide", tile, *given)
        operands = [x, weight, weight, weight]
    launcher((programs,), (*operands, biases, out), rows, columns, depth)


def _checked(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows(x)
    if weight.dtype != x.dtype or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"weight must be {x.dtype} [N, {x.shape[1]}], not {weight.dtype} {(*weight.shape,)}"
        )
    if not weight.is_contiguous():
        raise ValueError("weight must be contiguous")
    check_bias(bias, weight.shape[0])
    return x.contiguous(), weight


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    done: torch.Tensor,
    parts: int,
) -> torch.Tensor:
    """16-bit linear whose row m depends on row m of ``x``, the weight and ``parts`` alone.

    Args:
        x: [M, K] bf16 or fp16.
        weight: [N, K], the dtype of ``x``.
        bias: [N] or None.
        done: int32 zeros, from ``counters``; zero again afterwards.
        parts: The K partition; 0 takes the table's.

    Returns:
        [M, N] in the dtype of ``x``; the arithmetic is in ``reference.linear``.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    x, weight = _checked(x, weight, bias)
    (rows, depth), columns = x.shape, weight.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    chosen = plan(x.device, columns, depth)
    parts = parts or chosen.parts
    tile = chosen.tile(rows)
    if tile.kernel == "split" and not split.fits(parts, rows, columns):
        tile = tiles.replace(tile, kernel="walk")
    launch(x, weight, bias, done, out, parts, tile)
    return out


@functools.cache
def best_of(kernel: Any) -> Launcher:
    """The kernel that ranks the best columns of each column tile, with its constants."""
    return Launcher(kernel, dict(BLOCK=1024, num_warps=4))


def launch_argmax(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    value: torch.Tensor,
    index: torch.Tensor,
    parts: int,
    tile: tiles.Tile,
) -> None:
    """Run one tile choice of ``gemm_argmax``.

    Args:
        x: [M, K], contiguous.
        weight: [N, K], contiguous.
        bias: [N] or None.
        value: [M] fp32, filled.
        index: [M] int64, filled.
        parts: The K partition.
        tile: The launch; its kernel, ``split`` or ``walk``, does not matter.
    """
    from vllm_b70.kernels import linear as kernels

    columns, depth = weight.shape
    column_tiles = -(-columns // tile.bn)
    # Many rows go in pieces, so that the workspace stays bounded.
    piece = split.rows_at_once(tile.bm, column_tiles)
    for first in range(0, x.shape[0], piece):
        rows = x[first : first + piece]
        count = rows.shape[0]
        tensor = _rectangles(rows, weight, tile)
        launcher = _launcher(
            kernels.argmax, "argmax", tile, parts, x.dtype, bias is not None, depth % UNIT == 0,
            tensor, x.device,
        )  # fmt: skip
        best = torch.empty((column_tiles, count), dtype=torch.int64, device=x.device)
        launcher(
            (-(-count // tile.bm), column_tiles),
            (rows, weight, weight if bias is None else bias, best),
            count, columns, depth,
        )  # fmt: skip
        best_of(kernels.best_of)(
            (count,), (best, value[first:], index[first:]), count, column_tiles
        )


def gemm_argmax(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and its lowest column, without a row of logits.

    As ``argmax`` over ``gemm``'s result: columns tie when their logits round to one value, the
    lowest of them is taken, and a NaN counts as minus infinity.

    Args:
        x: [M, K] bf16 or fp16.
        weight: [N, K], the dtype of ``x``.
        bias: [N] or None.
        parts: The K partition; 0 takes the table's.

    Returns:
        Values [M] fp32 and columns [M] int64.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    x, weight = _checked(x, weight, bias)
    rows = x.shape[0]
    value = torch.empty(rows, dtype=torch.float32, device=x.device)
    index = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        chosen = plan(x.device, *weight.shape)
        launch_argmax(
            x,
            weight,
            bias,
            value,
            index,
            parts or chosen.parts,
            chosen.tile(min(rows, ARGMAX_ROWS)),
        )
    return value, index


def _fake_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    done: torch.Tensor,
    parts: int,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _fake_argmax(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    return x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.int64)


library.define(
    "gemm(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) done, int parts) -> Tensor",
    gemm,
    _fake_gemm,
    devices=("CUDA", "XPU", "CPU"),
)
library.define(
    "gemm_argmax(Tensor x, Tensor weight, Tensor? bias, int parts) -> (Tensor, Tensor)",
    gemm_argmax,
    _fake_argmax,
    devices=("CUDA", "XPU", "CPU"),
)
