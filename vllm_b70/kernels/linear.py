"""16-bit GEMM with one K partition for every row count.

    part[m, n] = sum over k of a part, ascending 16 at a time, of x[m, k] * w[n, k]
    y[m, n]    = sum over parts, ascending, of part;  out = round(y + bias)

The parts of a weight are an argument and never follow the row count. ``split`` lets one program
compute one part and the last to finish add them in index order; ``walk`` lets one program walk all
parts; ``argmax`` is a walk that keeps the best column of a tile instead of storing its logits.
Tiles, warps, stages, the order of the operands and the kind of load are free.
"""

import triton
import triton.language as tl

from vllm_b70.kernels.blocks import (
    POINTERS,
    advance_block,
    advance_transposed_block,
    load_block,
    make_block,
    make_transposed_block,
)
from vllm_b70.kernels.overlap import fetch, let_next_start, wait

#: Values of k that are never cut: parts begin at multiples of it, and BK divides it.
UNIT = 128
_UNIT = tl.constexpr(UNIT)


@triton.jit
def _part(
    x,
    w,
    row,
    column,
    M,
    N,
    K,
    first,
    last,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TENSOR: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """The sum over units first to last, ascending; fp32 [BN, BM] if SWAP, else [BM, BN]."""
    rows_k = tl.arange(0, BK)
    rows_m = row + tl.arange(0, BM)
    rows_n = column + tl.arange(0, BN)
    if TENSOR:
        if POINTERS:
            x_block = make_block(x, M, K, row, first * _UNIT, BM, BK)
            w_block = make_transposed_block(w, N, K, column, first * _UNIT, BN, BK)
    else:
        # Rows outside are read as row 0: what they give is never stored.
        x_at = x + tl.where(rows_m < M, rows_m, 0).to(tl.int64)[:, None] * K + rows_k[None, :]
        w_at = w + tl.where(rows_n < N, rows_n, 0).to(tl.int64)[:, None] * K + rows_k[None, :]
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for step in range(first * (_UNIT // BK), last * (_UNIT // BK)):
        k = step * BK
        if TENSOR:
            if POINTERS:
                a = load_block(x_block, row, k)
                b = load_block(w_block, k, column)
                x_block = advance_block(x_block, BK)
                w_block = advance_transposed_block(w_block, BK)
            else:
                a = x.load([row, k])
                b = w.load([column, k])
        elif EVEN_K:
            a = tl.load(x_at + k)
            b = tl.load(w_at + k)
        else:
            in_k = (k + rows_k < K)[None, :]
            a = tl.load(x_at + k, mask=in_k, other=0.0)
            b = tl.load(w_at + k, mask=in_k, other=0.0)
        if SWAP:
            acc = tl.dot(b, a.T, acc)
        elif TENSOR and POINTERS:
            acc = tl.dot(a, b, acc)
        else:
            acc = tl.dot(a, b.T, acc)
    return acc


@triton.jit
def _parts(
    x, w, row, column, M, N, K,
    PARTS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, TENSOR: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """The sum over all parts, each by ``_part``, in index order."""
    units = tl.cdiv(K, _UNIT)
    y = _part(x, w, row, column, M, N, K, 0, units // PARTS, BN, BM, BK, SWAP, TENSOR, EVEN_K)
    for i in range(1, PARTS):
        y += _part(
            x, w, row, column, M, N, K, i * units // PARTS, (i + 1) * units // PARTS,
            BN, BM, BK, SWAP, TENSOR, EVEN_K,
        )  # fmt: skip
    return y


@triton.jit
def _fetch_weight(
    weight, column, first, N, K,
    BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Bring the first AHEAD values of k, from unit ``first`` on, of a tile's columns to the L2.

    Before the wait for the kernel before this one: no kernel of a step writes a weight.
    """
    rows_n = tl.minimum(column + tl.arange(0, BN), N - 1)
    lines = tl.minimum(first * _UNIT + tl.arange(0, AHEAD // 64) * 64, K - 1)
    fetch(weight + rows_n.to(tl.int64)[:, None] * K + lines[None, :])


@triton.jit
def _tile_offsets(row, column, N, BN: tl.constexpr, BM: tl.constexpr, SWAP: tl.constexpr):
    """Rows, columns and offsets into [M, N] of an accumulator's elements."""
    rows_m = row + tl.arange(0, BM)
    rows_n = column + tl.arange(0, BN)
    if SWAP:
        m, n = rows_m[None, :], rows_n[:, None]
    else:
        m, n = rows_m[:, None], rows_n[None, :]
    return m, n, m.to(tl.int64) * N + n


@triton.jit
def _finish(
    out, bias, y, row, column, M, N,
    BN: tl.constexpr, BM: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    m, n, at = _tile_offsets(row, column, N, BN, BM, SWAP)
    if BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=(m < M) & (n < N))


# The row count must neither be a constant of a kernel nor choose between two compilations of it.
@triton.jit(do_not_specialize=["M"])
def split(
    x,
    w,
    weight,
    bias,
    partial,
    done,
    out,
    M,
    N,
    K,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TENSOR: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Few rows: the parts side by side. Grid (N / BN, PARTS, M / BM).

    Args:
        x: [M, K] fp16 or bf16; a tensor descriptor with blocks [BM, BK] if TENSOR, unless
            ``blocks.POINTERS``.
        w: [N, K], the dtype of x; a tensor descriptor with blocks [BN, BK] if TENSOR, unless
            ``blocks.POINTERS``.
        weight: What ``w`` describes; unread if AHEAD is 0.
        bias: [N], unread if not BIAS.
        partial: [PARTS, M, N] fp32 workspace; its former content does not matter. Unread if PARTS
            is 1.
        done: [M / BM * N / BN] int32, zero before and after. Unread if PARTS is 1.
        out: [M, N], the dtype of x.
        AHEAD: Values of k of its part, 0 or a power of two from 64 on, whose weights a program that
            may start early asks for before it waits.
    """
    part = tl.program_id(1)
    column, row = tl.program_id(0) * BN, tl.program_id(2) * BM
    units = tl.cdiv(K, _UNIT)
    first, last = part * units // PARTS, (part + 1) * units // PARTS
    if PDL:
        if AHEAD > 0:
            _fetch_weight(weight, column, first, N, K, BN, AHEAD)
        wait()
        let_next_start()
    y = _part(x, w, row, column, M, N, K, first, last, BN, BM, BK, SWAP, TENSOR, EVEN_K)
    if PARTS == 1:
        _finish(out, bias, y, row, column, M, N, BN, BM, SWAP, BIAS)
    else:
        m, n, at = _tile_offsets(row, column, N, BN, BM, SWAP)
        mask = (m < M) & (n < N)
        size = M.to(tl.int64) * N
        tl.store(partial + part * size + at, y, mask=mask)
        # All stores of this program come before its count, and the last program's loads after it.
        tl.debug_barrier()
        counter = done + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            tl.debug_barrier()
            y = tl.load(partial + at, mask=mask, other=0.0, cache_modifier=".cg")
            for i in tl.static_range(1, PARTS):
                y += tl.load(partial + i * size + at, mask=mask, other=0.0, cache_modifier=".cg")
            _finish(out, bias, y, row, column, M, N, BN, BM, SWAP, BIAS)
            tl.store(counter, 0)


@triton.jit
def _swizzle(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Tiles in bands of GROUP row tiles, so that programs at work together share operands."""
    band = tile // (GROUP * column_tiles)
    first = band * GROUP
    height = min(row_tiles - first, GROUP)
    inside = tile % (GROUP * column_tiles)
    return first + inside % height, inside // height


@triton.jit(do_not_specialize=["M"])
def walk(
    x,
    w,
    weight,
    bias,
    out,
    M,
    N,
    K,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TENSOR: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    FLATTEN: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Many rows: one program walks the parts of a tile, then takes another tile.

    Grid: any number of programs up to the number of tiles; else as ``split``. FLATTEN makes one
    loop of the tiles and their steps, so that the next tile's loads begin under a tile's stores.
    """
    row_tiles, column_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    if PDL:
        if AHEAD > 0:
            _, column = _swizzle(tl.program_id(0), row_tiles, column_tiles, 8)
            _fetch_weight(weight, column * BN, 0, N, K, BN, AHEAD)
        wait()
        let_next_start()
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN
    ):
        row, column = _swizzle(tile, row_tiles, column_tiles, 8)
        row, column = row * BM, column * BN
        y = _parts(x, w, row, column, M, N, K, PARTS, BN, BM, BK, SWAP, TENSOR, EVEN_K)
        _finish(out, bias, y, row, column, M, N, BN, BM, SWAP, BIAS)


@triton.jit
def rank(value, column):
    """An int64 that orders (value, column): the larger value first, then the lower column; the two
    zeros are equal, and a NaN is minus infinity, as in the logits that vLLM's samplers get."""
    value = tl.where(value == value, value + 0.0, float("-inf"))
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit(do_not_specialize=["M"])
def argmax(
    x,
    w,
    bias,
    best,
    M,
    N,
    K,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TENSOR: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The best column of each row and column tile. Grid (M / BM, N / BN), so that row tiles share
    the weight in the cache; else as ``split``.

    Args:
        best: [N / BN, M] int64, the rank of the best column (``rank``) among those of the tile.
        DTYPE: What the logits are rounded to before they are compared, so that columns tie exactly
            where the row of logits would.
    """
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    y = _parts(x, w, row, column, M, N, K, PARTS, BN, BM, BK, SWAP, TENSOR, EVEN_K)
    m, n, _ = _tile_offsets(row, column, N, BN, BM, SWAP)
    if BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    ranks = rank(y.to(DTYPE).to(tl.float32), n)
    # Below every rank of a column: the lowest order of a value is that of minus infinity.
    ranks = tl.where(n < N, ranks, -0x8000000000000000)
    rows_m = row + tl.arange(0, BM)
    tl.store(
        best + tl.program_id(1).to(tl.int64) * M + rows_m,
        tl.max(ranks, axis=0 if SWAP else 1),
        mask=rows_m < M,
    )


@triton.jit(do_not_specialize=["M", "tiles"])
def best_of(best, value, index, M, tiles, BLOCK: tl.constexpr):
    """One row's best column over all column tiles. Grid (M,).

    Args:
        best: [tiles, M] int64 from ``argmax``.
        value: [M] fp32, filled.
        index: [M] int64, filled.
    """
    row = tl.program_id(0)
    found = tl.full((BLOCK,), -0x8000000000000000, tl.int64)
    for first in range(0, tiles, BLOCK):
        at = first + tl.arange(0, BLOCK)
        ranks = tl.load(
            best + at.to(tl.int64) * M + row, mask=at < tiles, other=-0x8000000000000000
        )
        found = tl.maximum(found, ranks)
    top = tl.max(found, axis=0)
    order = (top >> 32).to(tl.int32)
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    tl.store(value + row, bits.to(tl.float32, bitcast=True))
    tl.store(index + row, 0x7FFFFFFF - (top & 0xFFFFFFFF))
