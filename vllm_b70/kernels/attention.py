"""Causal attention over a paged KV cache with one partition of the keys for every batch.

The keys of a sequence are cut every PART positions from position 0, a part every TILE positions.
For each query row, in fp32:

    a tile:  s = scale * (q . k);  top = max(m, s);  p = round(2 ** (s - top))
             total = total * 2 ** (m - top) + sum of p
             acc   = acc * 2 ** (m - top) + sum of p * v
    a part:  m, total and acc over its tiles in ascending order, from nothing
    a row:   its parts merged in index order from nothing (``_merge``);  out = acc / total

Both sums over a tile go through the matrix unit, 16 keys at a time in ascending order, because a
sum over the lanes of a register layout would follow the tile of query rows. Keys after the row's
position weigh exactly nothing, whatever their slots hold.

Two tiers compute the same bits. ``split`` and ``merge`` serve few rows a sequence: the parts side
by side, each result kept in a workspace. ``walk`` serves many: one program walks the parts of its
rows. Which rows share a program, warps, stages and tiers are free. PART and TILE are arithmetic: a
constant of the head size.

A row is a query token and one of the GROUP query heads that share a key head; the rows of a
sequence are numbered token by token, so any GROUP fills a tile.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(float("-inf"))
INFINITE = tl.constexpr(float("inf"))


@triton.jit
def _merge(m, total, acc, part_m, part_total, part_acc):
    """Add one part to the parts before it. The one place where parts meet, in every tier.

    Nothing (m of minus infinity, zeros) merges from either side without changing a bit.
    """
    top = tl.maximum(m, part_m)
    base = tl.where(top == NONE, 0.0, top)
    old, new = tl.exp2(m - base), tl.exp2(part_m - base)
    # Three roundings an element: launches switch fusion off, so that no kernel makes it two.
    return top, total * old + part_total * new, acc * old[:, None] + part_acc * new[:, None]


@triton.jit
def _finish(total, acc):
    """The row's output in fp32; zeros for a row that saw no key.

    Whether a visible value that is not finite ends as infinity or NaN, and which sign a zero has,
    may depend on the tile: here they are made one.
    """
    y = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    return tl.where(tl.abs(y) < INFINITE, y + 0.0, float("nan"))


@triton.jit
def _blocks(table, first, last, BLOCK: tl.constexpr, PART: tl.constexpr):
    """The two blocks that hold the part from position first on, if blocks are no smaller."""
    if BLOCK >= PART:
        left = tl.load(table + first // BLOCK)
        right = tl.load(table + tl.minimum(first + PART - 1, last) // BLOCK)
    else:
        left, right = 0, 0
    return left, right


@triton.jit
def _slots(
    table,
    first,
    last,
    left,
    right,
    border,
    block_stride,
    slot_stride,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where the positions from first on are in the cache, [TILE] int64; none after last is.

    left and right are the part's blocks, border is the position where right begins. Smaller blocks
    are looked up here, which costs a load in the loop over tiles.
    """
    position = first + tl.arange(0, TILE)
    if BLOCK >= PART:
        at_left = left.to(tl.int64) * block_stride + (first - border + BLOCK) * slot_stride
        at_right = right.to(tl.int64) * block_stride + (first - border) * slot_stride
        at = tl.where(position < border, at_left, at_right)
        return at + tl.arange(0, TILE) * slot_stride
    elif BLOCK % TILE == 0:
        block = tl.load(table + first // BLOCK).to(tl.int64)
        return block * block_stride + (first % BLOCK + tl.arange(0, TILE)) * slot_stride
    else:
        position = tl.minimum(position, last)
        block = tl.load(table + position // BLOCK).to(tl.int64)
        return block * block_stride + position % BLOCK * slot_stride


@triton.jit
def _tile(
    q,
    position,
    k,
    v,
    table,
    first,
    last,
    left,
    right,
    border,
    block_stride,
    slot_stride,
    scale,
    m,
    total,
    acc,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    GUARD: tl.constexpr,
):
    """One tile of keys. MASKED if a row of the program does not see all of them."""
    at = _slots(
        table, first, last, left, right, border, block_stride, slot_stride, BLOCK, PART, TILE
    )  # fmt: skip
    at = at[:, None] + tl.arange(0, D)[None, :]
    key = first + tl.arange(0, TILE)
    if MASKED:
        written = (key <= last)[:, None]
        keys = tl.load(k + at, mask=written, other=0.0)
        values = tl.load(v + at, mask=written, other=0.0)
    else:
        keys = tl.load(k + at)
        values = tl.load(v + at)
    s = tl.dot(q, tl.trans(keys)) * scale
    if MASKED:
        seen = key[None, :] <= position[:, None]
        s = tl.where(seen, s, NONE)
    top = tl.maximum(m, tl.max(s, axis=1))
    base = tl.where(top == NONE, 0.0, top)
    keep = tl.exp2(m - base)[:, None]
    p = tl.exp2(s - base[:, None]).to(values.dtype)
    total = tl.dot(p, tl.full((TILE, 16), 1.0, values.dtype), total * keep)
    if MASKED and GUARD:
        # Zero times a later token's infinity is no zero: take it out, and give it to its own rows.
        exponent: tl.constexpr = 0x7C00 if values.dtype == tl.float16 else 0x7F80
        finite = (values.to(tl.int16, bitcast=True) & exponent) != exponent
        other = tl.where(finite, 0.0, 1.0).to(values.dtype)
        hit = tl.dot(tl.where(seen, 1.0, 0.0).to(values.dtype), other)
        acc = tl.where(hit > 0.0, float("nan"), acc * keep)
        acc = tl.dot(p, tl.where(finite, values, tl.zeros_like(values)), acc)
    else:
        acc = tl.dot(p, values, acc * keep)
    return top, total, acc


@triton.jit
def _attend(
    q,
    position,
    least,
    last,
    k,
    v,
    table,
    block_stride,
    slot_stride,
    scale,
    begin,
    end,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    GUARD: tl.constexpr,
):
    """The merged parts begin to end of the rows of a program: m, total [ROWS], acc [ROWS, D].

    All rows see the keys up to position least, none sees one after last. GUARD: Not even an
    infinite or NaN value of a later key of the same sequence reaches a row (a draft that overflows
    must not spoil the token before it).
    """
    STEPS: tl.constexpr = PART // TILE
    all_m = tl.full((ROWS,), NONE, tl.float32)
    all_total = tl.zeros((ROWS,), tl.float32)
    all_acc = tl.zeros((ROWS, D), tl.float32)
    tiles = tl.minimum(end * STEPS, (last + TILE) // TILE)
    whole = tl.minimum((least + 1) // TILE, tiles)
    for part in tl.range(begin, tl.minimum(end, (tiles + STEPS - 1) // STEPS), num_stages=1):
        m = tl.full((ROWS,), NONE, tl.float32)
        total = tl.zeros((ROWS, 16), tl.float32)
        acc = tl.zeros((ROWS, D), tl.float32)
        stop = tl.minimum(part * STEPS + STEPS, tiles)
        middle = tl.minimum(tl.maximum(whole, part * STEPS), stop)
        left, right = _blocks(table, part * PART, last, BLOCK, PART)
        border = part * PART // BLOCK * BLOCK + BLOCK
        for i in range(part * STEPS, middle):
            m, total, acc = _tile(
                q, position, k, v, table, i * TILE, last, left, right, border,
                block_stride, slot_stride, scale, m, total, acc, D, BLOCK, PART, TILE, False, GUARD,
            )  # fmt: skip
        for i in tl.range(middle, stop, num_stages=1):
            m, total, acc = _tile(
                q, position, k, v, table, i * TILE, last, left, right, border,
                block_stride, slot_stride, scale, m, total, acc, D, BLOCK, PART, TILE, True, GUARD,
            )  # fmt: skip
        all_m, all_total, all_acc = _merge(all_m, all_total, all_acc, m, tl.max(total, axis=1), acc)
    return all_m, all_total, all_acc


@triton.jit
def _sequences(
    starts,
    lengths,
    sequences,
    capacity,
    SEQUENCES: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """What every program of split and merge works out alike, [SEQUENCES] each.

    Returns:
        Rows of a key head; parts, 0 if the sequence has no keys or is not for split; the row of the
        workspace where it begins; whether one program takes all parts of a row, because there is
        one part or the workspace is full.
    """
    s = tl.arange(0, SEQUENCES)
    inside = s < sequences
    first = tl.load(starts + s, mask=inside, other=0)
    rows = (tl.load(starts + s + 1, mask=inside, other=0) - first) * GROUP
    rows = tl.where((rows > 0) & (rows <= LIMIT), rows, 0)
    length = tl.load(lengths + s, mask=inside, other=0)
    parts = tl.where(rows > 0, (tl.maximum(length, 0) + PART - 1) // PART, 0)
    need = tl.where(parts > 1, parts * rows * HEADS, 0)
    ends = tl.cumsum(need, 0)
    return rows, parts, ends - need, (parts == 1) | (ends > capacity)


@triton.jit
def _at(vector, index, SEQUENCES: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, SEQUENCES) == index, vector, 0), axis=0)


@triton.jit
def _program_rows(
    q,
    start,
    length,
    rows,
    row_tile,
    head,
    q_stride,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Queries, positions and pointer offsets of the rows of one program."""
    row = row_tile * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    context = length - rows // GROUP
    position = tl.where(inside, context + row // GROUP, -1)
    least = context + row_tile * ROWS // GROUP
    last = context + (tl.minimum(row_tile * ROWS + ROWS, rows) - 1) // GROUP
    token = (start + row // GROUP).to(tl.int64)
    column = (head * GROUP + row % GROUP) * D
    query = tl.load(
        q + (token * q_stride + column)[:, None] + tl.arange(0, D)[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    return query, row, inside, position, tl.maximum(least, -1), tl.maximum(last, -1), token, column


# What follows the batch must neither be a constant of a kernel nor choose between compilations.
@triton.jit(do_not_specialize=["sequences", "capacity", "table_stride"])
def split(
    q,
    k,
    v,
    table,
    starts,
    lengths,
    out,
    work_m,
    work_total,
    work_acc,
    scale,
    sequences,
    capacity,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    slot_stride,
    head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    LIMIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Few rows a sequence: the parts side by side. Any grid; its programs share the parts evenly.

    No value of the device is needed to launch: each program finds its parts from the lengths.

    Args:
        q: [tokens, HEADS * GROUP, D] fp16 or bf16.
        k: [blocks, BLOCK, HEADS, D], any strides but the last, the dtype of q.
        v: As k, with the strides of k.
        table: [sequences, ...] int32, the blocks of each sequence.
        starts: [sequences + 1] int32, where each sequence's queries start.
        lengths: [sequences] int32, position after each sequence's last query.
        out: [tokens, HEADS * GROUP, D], the dtype of q.
        work_m, work_total: [capacity] fp32.
        work_acc: [capacity, D] fp32. The workspace's former content does not matter.
        scale: Of the scores, times log2(e).
        LIMIT: Sequences of more rows are left to walk.
        SEQUENCES: A power of two, at least ``sequences``.
    """
    rows, parts, base, alone = _sequences(
        starts, lengths, sequences, capacity, SEQUENCES, GROUP, HEADS, PART, LIMIT
    )
    items = tl.where(alone, tl.minimum(parts, 1), parts) * ((rows + ROWS - 1) // ROWS) * HEADS
    # Who walks all parts of a long sequence takes longest and starts first.
    long_items = tl.where(alone & (parts > 1), items, 0)
    long_ends, long_total = tl.cumsum(long_items, 0), tl.sum(long_items, axis=0)
    short_items = items - long_items
    short_ends = tl.cumsum(short_items, 0)
    for item in tl.range(tl.program_id(0), tl.sum(items, axis=0), tl.num_programs(0), num_stages=1):
        if item < long_total:
            local = item
            sequence = tl.sum((long_ends <= local).to(tl.int32), axis=0)
            local -= _at(long_ends - long_items, sequence, SEQUENCES)
        else:
            local = item - long_total
            sequence = tl.sum((short_ends <= local).to(tl.int32), axis=0)
            local -= _at(short_ends - short_items, sequence, SEQUENCES)
        workspace = _at(base, sequence, SEQUENCES)
        by_itself = _at(alone.to(tl.int32), sequence, SEQUENCES) != 0
        start = tl.load(starts + sequence)
        length = tl.load(lengths + sequence)
        its_rows = (tl.load(starts + sequence + 1) - start) * GROUP
        # Row tiles and heads that read the same or neighbouring keys run side by side.
        row_tiles = (its_rows + ROWS - 1) // ROWS
        row_tile = local % row_tiles
        head = local // row_tiles % HEADS
        part = local // row_tiles // HEADS
        query, row, inside, position, least, last, token, column = _program_rows(
            q, start, length, its_rows, row_tile, head, q_stride, GROUP, D, ROWS
        )
        end = tl.where(by_itself, (length + PART - 1) // PART, part + 1)
        m, total, acc = _attend(
            query, position, least, last, k + head * head_stride, v + head * head_stride,
            table + sequence.to(tl.int64) * table_stride, block_stride, slot_stride, scale,
            part, end, D, BLOCK, PART, TILE, ROWS, True,
        )  # fmt: skip
        columns = tl.arange(0, D)[None, :]
        if by_itself:
            y = _finish(total, acc).to(out.dtype.element_ty)
            tl.store(
                out + (token * out_stride + column)[:, None] + columns, y, mask=inside[:, None]
            )
        else:
            at = workspace + (part * HEADS + head) * its_rows + row
            tl.store(work_m + at, m, mask=inside)
            tl.store(work_total + at, total, mask=inside)
            at = at.to(tl.int64)[:, None] * D + columns
            tl.store(work_acc + at, acc, mask=inside[:, None])


@triton.jit(do_not_specialize=["sequences", "capacity"])
def merge(
    starts,
    lengths,
    out,
    work_m,
    work_total,
    work_acc,
    sequences,
    capacity,
    out_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    LIMIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Merge the parts that split left. Grid (tokens of split, HEADS, D / COLUMNS); else as split.

    Args:
        GROUP_ROWS: A power of two, at least GROUP.
        COLUMNS: Columns of a program; it divides D.
        STAGES: Loads in flight.
    """
    index, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, parts, base, alone = _sequences(
        starts, lengths, sequences, capacity, SEQUENCES, GROUP, HEADS, PART, LIMIT
    )
    # Sequences without keys are done here too: their rows get zeros.
    tokens = tl.where(alone & (parts > 0), 0, rows // GROUP)
    ends = tl.cumsum(tokens, 0)
    if index < tl.sum(tokens, axis=0):
        sequence = tl.sum((ends <= index).to(tl.int32), axis=0)
        token = index - _at(ends - tokens, sequence, SEQUENCES)
        its_rows = _at(rows, sequence, SEQUENCES)
        workspace = _at(base, sequence, SEQUENCES)
        position = tl.load(lengths + sequence) - its_rows // GROUP + token
        member = tl.arange(0, GROUP_ROWS)
        inside = member < GROUP
        columns = piece * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        m = tl.full((GROUP_ROWS,), NONE, tl.float32)
        total = tl.zeros((GROUP_ROWS,), tl.float32)
        acc = tl.zeros((GROUP_ROWS, COLUMNS), tl.float32)
        # Positions below zero, of padding, see no key.
        for part in tl.range(0, (position + PART) // PART, num_stages=STAGES):
            at = workspace + (part * HEADS + head) * its_rows + token * GROUP + member
            part_m = tl.load(work_m + at, mask=inside, other=NONE)
            part_total = tl.load(work_total + at, mask=inside, other=0.0)
            part_acc = tl.load(
                work_acc + at.to(tl.int64)[:, None] * D + columns, mask=inside[:, None], other=0.0
            )
            m, total, acc = _merge(m, total, acc, part_m, part_total, part_acc)
        at = (tl.load(starts + sequence) + token).to(tl.int64) * out_stride
        at = at + ((head * GROUP + member) * D)[:, None] + columns
        tl.store(out + at, _finish(total, acc).to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def walk(
    q,
    k,
    v,
    table,
    starts,
    lengths,
    out,
    scale,
    sequences,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    slot_stride,
    head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    LIMIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Many rows a sequence: one program walks the parts of its rows; else as ``split``.

    Grid (tokens * GROUP // ROWS + sequences, HEADS): at least the row tiles of any batch of so many
    tokens and sequences. LIMIT: Sequences of no more rows are left to split.
    """
    # A sequence's last rows see most keys: they start first.
    index, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    s = tl.arange(0, SEQUENCES)
    # The first row tile of a sequence; tile numbers between two sequences may be idle.
    begin = tl.load(starts + s, mask=s < sequences, other=0) * GROUP // ROWS + s
    sequence = tl.sum(((begin <= index) & (s < sequences)).to(tl.int32), axis=0) - 1
    start = tl.load(starts + sequence)
    rows = (tl.load(starts + sequence + 1) - start) * GROUP
    row_tile = index - (start * GROUP // ROWS + sequence)
    if (rows > LIMIT) & (row_tile * ROWS < rows):
        length = tl.load(lengths + sequence)
        query, _, inside, position, least, last, token, column = _program_rows(
            q, start, length, rows, row_tile, head, q_stride, GROUP, D, ROWS
        )
        # Without GUARD: no draft comes here (layers.attention), so a later token is here to stay.
        # If it overflowed, every row from it on is NaN, and whatever the request has yet to say
        # hangs on no row before it.
        m, total, acc = _attend(
            query, position, least, last, k + head * head_stride, v + head * head_stride,
            table + sequence.to(tl.int64) * table_stride, block_stride, slot_stride, scale,
            0, last // PART + 1, D, BLOCK, PART, TILE, ROWS, False,
        )  # fmt: skip
        y = _finish(total, acc).to(out.dtype.element_ty)
        at = (token * out_stride + column)[:, None] + tl.arange(0, D)[None, :]
        tl.store(out + at, y, mask=inside[:, None])
