"""Norms over the last dimension, one tree of additions for a row.

    total = sum over a row, padded with zeros to a power of two, of x * x
    y     = x * rsqrt(total / size + epsilon) * (weight + offset) * gate;   out = round(y)

The tree adds halves of a row to one another down to ``TREE`` values, then neighbours. Every step
adds two values, so the order is the same whatever layout a compiler gives the row: rows of a
program, warps and the alignment of a pointer are free.
"""

import triton
import triton.language as tl

from vllm_b70.kernels.overlap import fetch, let_next_start, wait

#: Values of a row that the tree keeps while it adds halves; four warps of eight values a lane.
TREE = tl.constexpr(1024)


@triton.jit
def _row_sum(x, ROWS: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr, LAST: tl.constexpr):
    """[ROWS, SIZE] to [ROWS, 1], two values at a time; SIZE is 2 ** LEVELS."""
    for level in tl.static_range(LEVELS):
        if (SIZE >> level) > TREE:
            x = tl.sum(tl.reshape(x, (ROWS, 2, SIZE >> (level + 1))), axis=1)
        elif (SIZE >> level) > LAST:
            x = tl.sum(tl.reshape(x, (ROWS, SIZE >> (level + 1), 2)), axis=2)
        else:
            # A sum would take each level through shared memory; a split takes all of them at once.
            first, second = tl.split(tl.reshape(x, (ROWS, SIZE >> (level + 1), 2)))
            x = first + second
    return x


@triton.jit
def _rows_at(base, row, outer, inner, HEADS: tl.constexpr):
    """Pointers to rows; HEADS rows share an outer index."""
    at = (row // HEADS).to(tl.int64) * outer + (row % HEADS) * inner
    return base + at[:, None]


@triton.jit
def _read(
    x, residual, z, row, column, mask, x_outer, x_inner, r_outer, r_inner, z_outer, z_inner,
    HEADS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Columns of the rows, the residual added and the sum rounded; and the gate's input, fp32."""
    values = tl.load(_rows_at(x, row, x_outer, x_inner, HEADS) + column, mask=mask, other=0.0)
    gate = values
    if GATE != "none":
        gate = tl.load(_rows_at(z, row, z_outer, z_inner, HEADS) + column, mask=mask, other=0.0)
    if RESIDUAL:
        added = tl.load(
            _rows_at(residual, row, r_outer, r_inner, HEADS) + column, mask=mask, other=0.0
        )
        values = (values.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
    return values, gate.to(tl.float32)


@triton.jit
def _write(
    out, row, column, mask, values, inverse, scale, offset, gate,
    COLUMNS: tl.constexpr, WEIGHT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Norm, weight and gate of the columns that ``_read`` read."""
    y = values * inverse
    if WEIGHT:
        y = y * (scale.to(tl.float32) + offset)
    if GATE != "none":
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        y = y * (gate * sigmoid if GATE == "silu" else sigmoid)
    at = row.to(tl.int64)[:, None] * COLUMNS + column
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


# The row count itself is compiled into no kernel. It does choose ROWS, LAST, PDL and warps, thus
# among compilations: none of them can change a bit, because every step of the tree adds two values.
@triton.jit(do_not_specialize=["rows"])
def rms_norm(
    x,
    residual,
    z,
    weight,
    out,
    total_out,
    rows,
    epsilon,
    offset,
    x_outer,
    x_inner,
    r_outer,
    r_inner,
    z_outer,
    z_inner,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATE: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows / ROWS). Row r of x, residual, z is at r // HEADS * outer + r % HEADS * inner.

    Args:
        x: rows of COLUMNS fp16 or bf16 (or fp32) values.
        residual: As x; unread if not RESIDUAL. It is added first, and the sum is rounded to the
            dtype of x before it is normed, so that a fused norm equals an addition and a norm.
        z: As x; unread if GATE is "none".
        weight: [COLUMNS] of any floating dtype; unread if not WEIGHT.
        out: [rows, COLUMNS], the dtype of x.
        total_out: [rows, COLUMNS], the rounded sum; unwritten if not RESIDUAL.
        rows: How many rows.
        epsilon: Added to the mean square, or to the sum of squares if not MEAN.
        offset: Added to the weight in fp32.
        SIZE: COLUMNS rounded up to a power of two, 2 ** LEVELS; half of that where there is a REST.
        REST: Columns after SIZE, a power of two, if a row is that and no more; else 0. What pads
            such a row is then neither loaded nor squared.
        GATE: "none", "silu" or "sigmoid", of z.
        LAST: Values of a row that are left where its warps meet; every thread adds those up.
    """
    if PDL:
        if WEIGHT:
            LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
            lines = tl.arange(0, SIZE // LINE if SIZE > LINE else 1) * LINE
            fetch(weight + tl.minimum(lines, COLUMNS - 1))
        wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)[None, :]
    mask = (row < rows)[:, None] & (column < COLUMNS)
    scale = 0.0
    if WEIGHT:
        # First, so that it is under way with the row.
        scale = tl.load(weight + column, mask=column < COLUMNS, other=0.0)
    if REST > 0:
        columns_2 = SIZE + tl.arange(0, REST)[None, :]
        mask_2 = (row < rows)[:, None] & (columns_2 < COLUMNS)
        scale_2 = 0.0
        if WEIGHT:
            scale_2 = tl.load(weight + columns_2)
    if PDL:
        # Here, because ptxas moves no load across it; it moved the weight's behind the reduction.
        let_next_start()
    values, gate = _read(
        x, residual, z, row, column, mask, x_outer, x_inner, r_outer, r_inner, z_outer, z_inner,
        HEADS, RESIDUAL, GATE,
    )  # fmt: skip
    if REST > 0:
        values_2, gate_2 = _read(
            x, residual, z, row, columns_2, mask_2, x_outer, x_inner, r_outer, r_inner, z_outer,
            z_inner, HEADS, RESIDUAL, GATE,
        )  # fmt: skip
    # After all loads: none of them could pass a store.
    if RESIDUAL:
        at = row.to(tl.int64)[:, None] * COLUMNS
        tl.store(total_out + at + column, values, mask=mask)
        if REST > 0:
            tl.store(total_out + at + columns_2, values_2, mask=mask_2)
    values = values.to(tl.float32)
    squares = values * values
    if REST > 0:
        values_2 = values_2.to(tl.float32)
        # The first step of the tree: the second half is REST values, then zeros.
        pieces = tl.reshape(squares, (ROWS, SIZE // REST, REST))
        first = tl.arange(0, SIZE // REST)[None, :, None] == 0
        pieces += tl.where(first, (values_2 * values_2)[:, None, :], 0.0)
        squares = tl.reshape(pieces, (ROWS, SIZE))
    total = _row_sum(squares, ROWS, SIZE, LEVELS, LAST)
    if MEAN:
        total = total / COLUMNS
    inverse = tl.rsqrt(total + epsilon)
    _write(
        out, row, column, mask, values, inverse, scale, offset, gate, COLUMNS, WEIGHT, GATE
    )  # fmt: skip
    if REST > 0:
        _write(
            out, row, columns_2, mask_2, values_2, inverse, scale_2, offset, gate_2,
            COLUMNS, WEIGHT, GATE,
        )  # fmt: skip
