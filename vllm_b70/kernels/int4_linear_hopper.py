"""The W4A16 GEMM for many rows on Hopper, in Gluon: the bits of ``kernels.int4_linear``.

The arithmetic is stated there and is the same: the products of a group 16 at a time in ascending k,
from zero; times the scale and added, in two roundings; the groups of a part ascending, then the
parts; the bias; one rounding. The packed words are the same too. Only who does what is different,
and needs what Triton's language cannot say:

* Three sets of warps. Two *warp groups* share a tile of 128 columns, 64 columns each; a producer
  fills a ring of x in shared memory by TMA. Nothing but the ring joins them, so that the matrix
  unit works for one warp group while the other unpacks, multiplies by the scale and adds.
* One *chain*, eight matrix instructions, makes a group's sum of 64 columns and all BM rows. While
  it runs, its warp group unpacks the words of the next group and loads those of the one after.
* The weight goes from global memory to registers in the order in which the matrix unit reads it: a
  thread loads its own 16 bytes a column and group. x alone passes through shared memory.
* The sum of the finished parts waits in shared memory: registers hold the part at hand only.
* Programs are persistent, one a multiprocessor; the first words of a program's next tile are loaded
  while its last group is multiplied.
* Where tiles do not come out even, programs may share some (``hopper_schedule``): one begins a
  tile, or a part of it, and the next one goes on from its sums, group by group in the same order:
  a cut changes no bit. With ``tiles`` a part's sum and the total of those before are handed on;
  with ``parts`` each part's sum is kept in the workspace, and all who had one of a tile then share
  its rows to add the parts in order.

Hazards, and what excludes them:

* *The registers of a chain's weight* are read by the matrix unit until the chain is done. The wait
  for a chain names them (``deps``), so that they stay allocated up to there, and no chain is in
  flight where a loop closes: that is where the compiler copies loop variables.
* *A ring slot* is filled again only when its ``empty`` barrier says that both warp groups are done
  with it; each arrives there when all four of its warps have waited for their chain.
* *The phases of a barrier* alternate, and a wait names one of the two. Slot s serves the steps s,
  s + STAGES, ...; at step t it is in use for the (t // STAGES)-th time, so that number's parity is
  the phase in which it becomes full. The producer waits for the phase before, in which the former
  content was given back. Neither can be a whole round ahead of the other: each waits for it.
* *The total*, which also stages the output, is one warp group's own. Between the loads from it and
  the next stores by other threads lies a barrier: that at the end of each group, or of a wait for
  another program.
* *Sums in the workspace* are stored by the thread, of the same warp group's half, whose counterpart
  loads them. A barrier of the warp group and a release by one of its threads come before the count,
  an acquire by every thread and a barrier after it (``_count``, ``_await``); loads go past the L1.
  What the workspace held before is not read: each sum is stored, or zero, before it is waited for.
* *Counters* are zero again at the end, for the next launch or replay: who has waited last sets them
  back. Launches on one weight must not overlap, as everywhere (``split.counters``).
* *Waiting for ever*: a program publishes what the next one needs before it waits for the one
  before, and the grid is no larger than the device, so that all run. With ``parts`` a program also
  waits for the next: two such launches on two streams could each keep out the other's programs.

``tests/hopper`` reads the first from the machine code; the others are raced in ``tests/gpu``.

This file is for CUDA alone: ``ops.hopper`` imports it when a launch needs it. Gluon is not run by
Triton's interpreter as this kernel uses it, so ``tests/kernels`` has no test of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm_b70.kernels import hopper_schedule, int4_linear

#: Columns of a tile; a warp group has half of them.
BN = gl.constexpr(128)
#: Row tiles that programs side by side go through before the next column tile: what they share of x
#: and of the weight then comes from the L2.
BAND = gl.constexpr(16)
#: Groups by which the producer has words brought to the L2: the warp groups load them less than a
#: microsecond before their use.
AHEAD = gl.constexpr(4)
#: Registers of a thread that multiplies, and of one that produces.
REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)

# Gluon is experimental: these have other names in some of the versions that ``ops.hopper`` lists.
# A barrier of one set of warps; a copy by TMA; shared memory seen as another type.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None)
    or gl.shared_memory_descriptor._reinterpret
)
#: The same instructions as Triton's kernels, compiled as Gluon.
_pairs = gluon.jit(int4_linear._pairs_cuda.fn)
#: The schedule.
_cut = gluon.jit(hopper_schedule.cut)
_piece_at = gluon.jit(hopper_schedule.piece_at)
_segment = gluon.jit(hopper_schedule.segment)
_holders = gluon.jit(hopper_schedule.holders)


@gluon.constexpr_function
def _word_layout():
    """[64, 16] words: each thread holds four words of each of its two fragment rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )


@gluon.constexpr_function
def _total_layout(bm):
    """[64, bm] fp32 so that a thread's values are 16-byte pieces, neighbours side by side.

    Follows the registers of the matrix layout: no access has a bank conflict.
    """
    rows = [[0, 16 << i] for i in range((bm // 16).bit_length() - 1)]
    return gl.SharedLinearLayout(
        [[0, 1], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0]] + rows + [[16, 0], [32, 0]]
    )


@gluon.jit
def _weight(words, offset, MMA: gl.constexpr, FP16: gl.constexpr):
    """[64, 16] words as the left operand [64, 128] in ascending k; registers are only renamed."""
    words, offset = gl.broadcast(words, offset)
    a0, a1, b0, b1, c0, c1, d0, d1 = _pairs(words, offset, FP16)
    first = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    second = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    w = gl.join(first, second)  # row, word, low, high, half
    w = gl.reshape(w, (64, 4, 4, 2, 2, 2))  # row, lane, block, low, high, half
    w = gl.permute(w, (0, 2, 5, 4, 1, 3))  # row, block, half, high, lane, low
    w = gl.reshape(w, (64, 128))
    return gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _load(words, scale, offset, z, group, end, column, there, next_column, rows_w, rows_s, NP,
          ASYMMETRIC: gl.constexpr, EVEN_N: gl.constexpr):  # fmt: skip
    """A group's words [64, 16], scales [64] and offsets [64, 1], from a column on; from group
    ``end`` on, those of the next segment's first groups, which are ``there`` further on.

    The scalar part of an address is added to the pointer, so that each thread keeps one small
    offset. Columns past NP repeat the last one; their sums are not stored.
    """
    past = group >= end
    at = group * NP + gl.where(past, there, column)
    if not EVEN_N:
        column = gl.where(past, next_column, column)
        rows_w = gl.minimum(rows_w, NP - 1 - column)
        rows_s = gl.minimum(rows_s, NP - 1 - column)
    word = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, _word_layout())), 0)
    w = gl.load(words + at * 16 + (gl.expand_dims(rows_w * 16, 1) + word))
    if ASYMMETRIC:
        z = gl.expand_dims(gl.load(offset + at + rows_w), 1)
    return w, gl.load(scale + at + rows_s), z


@gluon.jit
def _place(tile, row_tiles, column_tiles, BM: gl.constexpr):
    """First row and first column of a tile."""
    band = tile // (BAND * column_tiles)
    height = gl.minimum(row_tiles - band * BAND, BAND)
    inside = tile - band * BAND * column_tiles
    return (band * BAND + inside % height) * BM, inside // height * BN


@gluon.jit
def _prefetch(words, group, last, column, NP):
    """Have the words of a tile's group brought to the L2; one thread asks for it."""
    if group < last:
        at = (words + (group * NP + column) * 16).to(gl.int64)
        gl.inline_asm_elementwise(
            """{
            .reg .pred one;
            elect.sync _|one, 0xffffffff;
            @one cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,r",
            [at, gl.minimum(BN, NP - column) * 64],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _await(counter, least):
    """Wait until a counter has a value; what was published before is then visible to the thread."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred less;
        .reg .b32 value;
        again:
        ld.acquire.gpu.global.b32 value, [$1];
        setp.lt.s32 less, value, $2;
        @less bra again;
        mov.b32 $0, value;
        }""",
        "=r,l,r",
        [counter.to(gl.int64), least],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    # The other threads have waited too: the counter may be changed.
    _barrier()


@gluon.jit
def _count(counter, last):
    """Add one to a counter, after all that this warp group has stored, or back to zero from
    ``last``. One thread does, the first of the four warps."""
    _barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .pred one, end;
        .reg .b32 value;
        mov.u32 value, %tid.x;
        and.b32 value, value, 127;
        setp.eq.u32 one, value, 0;
        mov.b32 value, -1;
        @one atom.add.acq_rel.gpu.global.s32 value, [$1], 1;
        setp.eq.s32 end, value, $2;
        @end st.relaxed.gpu.global.b32 [$1], 0;
        mov.b32 $0, value;
        }""",
        "=r,l,r",
        [counter.to(gl.int64), last],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _vectors(bm, store):
    """PTX, and its operands, that stores or loads a thread's registers of [64, bm] fp32 sums, in 16
    byte pieces 2 KiB apart: of 8 rows each, in the matrix unit's order. At address 0 nothing is
    stored, and zeros are loaded."""
    registers = bm // 2
    pointer = registers * (2 if store else 1)
    body = [
        "{",
        ".reg .pred any;",
        ".reg .b32 thread;",
        ".reg .b64 at;",
        f"setp.ne.b64 any, ${pointer}, 0;",
        "mov.u32 thread, %tid.x;",
        "and.b32 thread, thread, 127;",
        f"mad.wide.u32 at, thread, 16, ${pointer};",
    ]
    for i in range(0, registers, 4):
        four = ", ".join(f"${i + j}" for j in range(4))
        if store:
            body.append(f"@any st.global.v4.f32 [at + {i * 512}], {{{four}}};")
        else:
            body.extend(f"mov.b32 ${i + j}, 0;" for j in range(4))
            body.append(f"@any ld.global.cg.v4.f32 {{{four}}}, [at + {i * 512}];")
    outputs = ["=f"] * registers
    # A value that is stored is also the result, in the same register.
    values = [str(i) for i in range(registers)] if store else []
    return "\n".join([*body, "}"]), ",".join([*outputs, *values, *["l"] * registers])


@gluon.jit
def _keep(condition, at, y):
    """Store sums [64, BM] where ``_fetch`` finds them, on a condition: each thread's own, at one
    address plus constants. With an address a value the compiler would keep all of those in
    registers, and spill; with a branch it would move the sums about."""
    CODE: gl.constexpr = _vectors(y.shape[1], True)
    at = gl.where(condition, at.to(gl.int64), 0)
    places = gl.full(y.shape, 0, gl.int64, y.type.layout) + at
    gl.inline_asm_elementwise(
        CODE[0], CODE[1], [y, places], dtype=gl.float32, is_pure=False, pack=y.shape[1] // 2
    )


@gluon.jit
def _fetch(condition, at, none):
    """Load sums that ``_keep`` stored, or of 8 rows each 2 KiB of them, past the L1; else zeros."""
    CODE: gl.constexpr = _vectors(none.shape[1], False)
    at = gl.where(condition, at.to(gl.int64), 0)
    places = gl.full(none.shape, 0, gl.int64, none.type.layout) + at
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], [places], dtype=gl.float32, is_pure=False, pack=none.shape[1] // 2
    )


@gluon.jit
def _uniform(value):
    """An integer that all threads have, for a compiler that does not see that they do: what follows
    from it is then computed once a warp. Divisions are what hides it."""
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;",
        "=r,r",
        [value],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _range(strided, tiles, groups, PIECES: gl.constexpr):
    """This program's first and last + 1 i for ``segment``, its last piece, and its range."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    start = _cut(program, programs, tiles - strided, groups, PIECES)
    stop = _cut(program + 1, programs, tiles - strided, groups, PIECES)
    whole = (strided - program + programs - 1) // programs
    last_piece = _piece_at(stop - 1, groups, PIECES)
    segments = last_piece - _piece_at(start, groups, PIECES) + 1 if stop > start else 0
    start, stop = _uniform(start), _uniform(stop)
    return _uniform(-whole), _uniform(segments), _uniform(last_piece), start, stop


@gluon.jit
def _program():
    """``program_id``, read where it is asked for: what follows from it is then not kept in
    registers through the loop over groups."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait():
    """Wait for the kernel before this one and for what it wrote; see ``overlap``."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _let_next_start():
    """Allow the next kernel to start, once every program has said so."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _sums(state, n, HALF: gl.constexpr, BM: gl.constexpr):
    """Where a warp group's half of the n-th tile of sums is kept."""
    return state + (n * 2 + HALF) * (64 * BM)


@gluon.jit
def _work(i, strided, last_piece, start, stop, groups, row_tiles, column_tiles,
          PIECES: gl.constexpr, BM: gl.constexpr):  # fmt: skip
    """This program's i-th segment as ``segment`` gives it, and its tile's first column."""
    tile, first, last = _segment(
        i, gl.program_id(0), gl.num_programs(0), strided, last_piece, start, stop, groups, PIECES
    )
    _, column = _place(tile, row_tiles, column_tiles, BM)
    return _uniform(tile), _uniform(first), _uniform(last), _uniform(column)


@gluon.jit
def _feed(step, first, last, row, column, x_at, ring, full, empty, words, NP, BM: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """Fill the ring with groups of x, as its slots become free."""
    for ahead in gl.static_range(AHEAD):
        _prefetch(words, first + ahead, last, column, NP)
    for group in range(first, last):
        _prefetch(words, group + AHEAD, last, column, NP)
        slot = step % STAGES
        # On a new barrier the wait for the phase before the first returns at once.
        mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(slot), BM * 128 * 2)
        # Rows past the last are zeros.
        _copy(x_at, [row, group * 128], full.index(slot), ring.index(slot))
        step += 1
    return step


@gluon.jit
def _produce(x_at, ring, full, empty, words, NP, groups, row_tiles, column_tiles, strided,
             PARTS: gl.constexpr, CUT: gl.constexpr, BM: gl.constexpr,
             STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Fill the ring for this program's tiles, or for its segments."""
    if PDL:
        _wait()
        _let_next_start()
    step = 0
    tiles = row_tiles * column_tiles
    if CUT == "":
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            row, column = _place(tile, row_tiles, column_tiles, BM)
            step = _feed(
                step, 0, groups, row, column, x_at, ring, full, empty, words, NP, BM, STAGES
            )
    else:
        PIECES: gl.constexpr = PARTS if CUT == "parts" else 1
        begin, end, last_piece, start, stop = _range(strided, tiles, groups, PIECES)
        for i in range(begin, end):
            tile, first, last, column = _work(
                i, strided, last_piece, start, stop, groups, row_tiles, column_tiles, PIECES, BM
            )
            row, _ = _place(tile, row_tiles, column_tiles, BM)
            step = _feed(
                step, first, last, row, column, x_at, ring, full, empty, words, NP, BM, STAGES
            )


@gluon.jit
def _add_parts(state, done, bias, out, M, N, groups, row_tiles, column_tiles, start, stop,
               HALF: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr,
               BIAS: gl.constexpr):  # fmt: skip
    """Add the parts of the tiles that this program has a segment of, in index order. Those who have
    one share the rows of the tile, 16 at a time."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    program, programs = gl.program_id(0), gl.num_programs(0)
    tiles = row_tiles * column_tiles
    none = gl.zeros((64, 16), gl.float32, MMA)
    rows_n = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    rows_m = gl.arange(0, 16, layout=gl.SliceLayout(0, MMA))
    for tile in range(start // groups, (stop - 1) // groups + 1):
        counter = done + (tile * 2 + HALF)
        _await(counter, PARTS)
        row, column = _place(tile, row_tiles, column_tiles, BM)
        n = column + HALF * 64 + rows_n
        begin, end = _holders(tile, programs, tiles, groups)
        for sixteen in range(program - begin, BM // 16, end - begin + 1):
            at = _sums(state, tile * PARTS, HALF, BM) + sixteen * (16 * 64)
            y = _fetch(True, at, none)
            for part in gl.static_range(1, PARTS):
                y += _fetch(True, at + part * (2 * 64 * BM), none)
            if BIAS:
                b = gl.load(bias + n, mask=n < N, other=0.0)
                y += gl.expand_dims(b.to(gl.float32), 1)
            m = row + sixteen * 16 + rows_m
            to = gl.expand_dims(m.to(gl.int64) * N, 0) + gl.expand_dims(n, 1)
            gl.store(
                out + to, y.to(out.dtype.element_ty),
                mask=gl.expand_dims(m < M, 0) & gl.expand_dims(n < N, 1),
            )  # fmt: skip
        _count(counter, PARTS + end - begin)


@gluon.jit
def _begin(words, scale, offset, first, last, column, rows_w, rows_s, NP, MMA: gl.constexpr,
           FP16: gl.constexpr, ASYMMETRIC: gl.constexpr, EVEN_N: gl.constexpr):  # fmt: skip
    """What ``_group`` needs of a program's first two groups: the first one's words become the
    weight; those of the second are on their way."""
    middle: gl.constexpr = 0x64086408 if FP16 else 0x43084308
    z = gl.full((64, 1), middle, gl.int32, _word_layout())
    w, s, z = _load(
        words, scale, offset, z, first, last, column, column, column, rows_w, rows_s, NP,
        ASYMMETRIC, EVEN_N,
    )  # fmt: skip
    a = _weight(w, z, MMA, FP16)
    w, s_next, z = _load(
        words, scale, offset, z, first + 1, last, column, column, column, rows_w, rows_s, NP,
        ASYMMETRIC, EVEN_N,
    )  # fmt: skip
    return a, w, s, s_next, z


@gluon.jit
def _group(acc, a, w, s, s_next, z, step, none, ring, full, empty, words, scale, offset, group, end,
           column, there, next_column, rows_w, rows_s, NP, MMA: gl.constexpr,
           STAGES: gl.constexpr, FP16: gl.constexpr, ASYMMETRIC: gl.constexpr,
           EVEN_N: gl.constexpr):  # fmt: skip
    """Add a group to a part's sum; the next one's words become the weight, and those of the one
    after are loaded."""
    slot = step % STAGES
    mbarrier.wait(full.index(slot), step // STAGES & 1)
    p = warpgroup_mma(a, ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
    # In other registers than a, which the matrix unit still reads.
    a_next = _weight(w, z, MMA, FP16)
    w, s_after, z = _load(
        words, scale, offset, z, group + 2, end, column, there, next_column, rows_w, rows_s, NP,
        ASYMMETRIC, EVEN_N,
    )  # fmt: skip
    p, a, a_next = warpgroup_mma_wait(0, deps=[p, a, a_next])
    # All four warps have waited for all their reads of the slot.
    _barrier()
    mbarrier.arrive(empty.index(slot))
    # Two roundings: launches switch fusion off, so that no kernel makes one of them.
    acc += p * gl.expand_dims(s.to(gl.float32), 1)
    return acc, a_next, w, s_next, s_after, z


@gluon.jit
def _finish(total, bias, out, row, column, rows_s, M, N, MMA: gl.constexpr, BM: gl.constexpr,
            BIAS: gl.constexpr):  # fmt: skip
    """Bias, rounding, and the output of half of the columns of a tile."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    STAGED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [0, 1])
    y = total.load(MMA)
    if BIAS:
        b = gl.load(bias + column + rows_s, mask=column + rows_s < N, other=0.0)
        y += gl.expand_dims(b.to(gl.float32), 1)
    # Through shared memory, where the total has been, to store 16 bytes along n.
    stage = _reinterpret(total, DTYPE, [2, 64, BM], STAGED).index(0)
    _barrier()
    stage.store(y.to(DTYPE))
    _barrier()
    n = column + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    m = row + gl.arange(0, BM, layout=gl.SliceLayout(0, STORE))
    to = gl.expand_dims(m.to(gl.int64) * N, 0) + gl.expand_dims(n, 1)
    gl.store(
        out + to, stage.load(STORE),
        mask=gl.expand_dims(m < M, 0) & gl.expand_dims(n < N, 1),
    )  # fmt: skip


@gluon.jit
def _consume(x_at, ring, full, empty, totals, words, scale, offset, bias, state, done, out, M, N,
             NP, groups, row_tiles, column_tiles, strided, zero, HALF: gl.constexpr,
             PARTS: gl.constexpr, CUT: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
             FP16: gl.constexpr, ASYMMETRIC: gl.constexpr, BIAS: gl.constexpr,
             EVEN_N: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Multiply half of the columns of each of this program's tiles, as one warp group."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    rows_w = gl.arange(0, 64, layout=gl.SliceLayout(1, _word_layout()))
    rows_s = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    none = gl.zeros((64, BM), gl.float32, MMA)
    total = totals.index(HALF)
    step = 0
    tiles = row_tiles * column_tiles
    if CUT == "":
        _, column = _place(gl.program_id(0), row_tiles, column_tiles, BM)
        column += HALF * 64
        a, w, s, s_next, z = _begin(
            words, scale, offset, 0, groups, column, rows_w, rows_s, NP, MMA, FP16, ASYMMETRIC,
            EVEN_N,
        )  # fmt: skip
        if PDL:
            _wait()
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            row, column = _place(tile, row_tiles, column_tiles, BM)
            column += HALF * 64
            after = tile + gl.num_programs(0)
            # After the last tile its own words are loaded once more, and not used.
            _, next_column = _place(
                gl.where(after < tiles, after, tile), row_tiles, column_tiles, BM
            )
            next_column += HALF * 64
            there = next_column - groups * NP
            acc = none
            # zero is 0: it keeps the compiler from a copy of the loop over groups for each part.
            for part in range(PARTS + zero):
                for group in range(part * groups // PARTS, (part + 1) * groups // PARTS):
                    acc, a, w, s, s_next, z = _group(
                        acc, a, w, s, s_next, z, step, none, ring, full, empty, words, scale,
                        offset, group, groups, column, there, next_column, rows_w, rows_s, NP, MMA,
                        STAGES, FP16, ASYMMETRIC, EVEN_N,
                    )  # fmt: skip
                    step += 1
                # A part's sum always goes through the total, in whole 16-byte pieces: that keeps
                # ptxas from moving the sums between registers, and spilling, in the loop over
                # groups.
                y = acc
                if part > 0:
                    y = total.load(MMA) + y
                total.store(y)
                acc = none
            _finish(total, bias, out, row, column, rows_s, M, N, MMA, BM, BIAS)
    else:
        SIDE: gl.constexpr = CUT == "parts"
        PIECES: gl.constexpr = PARTS if SIDE else 1
        begin, end, last_piece, start, stop = _range(strided, tiles, groups, PIECES)
        tile, first, last, column = _work(
            begin, strided, last_piece, start, stop, groups, row_tiles, column_tiles, PIECES, BM
        )
        column += HALF * 64
        a, w, s, s_next, z = _begin(
            words, scale, offset, first, last, column, rows_w, rows_s, NP, MMA, FP16, ASYMMETRIC,
            EVEN_N,
        )  # fmt: skip
        if PDL:
            _wait()
        for i in range(begin, end):
            tile, first, last, column = _work(
                i, strided, last_piece, start, stop, groups, row_tiles, column_tiles, PIECES, BM
            )
            column += HALF * 64
            # After the last segment its own words are loaded once more, and not used.
            _, next_first, _, next_column = _work(
                min(i + 1, end - 1), strided, last_piece, start, stop, groups, row_tiles,
                column_tiles, PIECES, BM,
            )  # fmt: skip
            next_column += HALF * 64
            there = (next_first - last) * NP + next_column
            first_part = _uniform(_piece_at(first, groups, PARTS))
            if SIDE:
                # One part at a time, whose sum goes to the workspace.
                part = first_part
                resumed = first > part * groups // PARTS
                before = _program() - 1
                if resumed:
                    _await(done + ((tiles + before) * 2 + HALF), 1)
                acc = _fetch(resumed, _sums(state, tiles * PARTS + before, HALF, BM), none)
                for group in range(first, last):
                    acc, a, w, s, s_next, z = _group(
                        acc, a, w, s, s_next, z, step, none, ring, full, empty, words, scale,
                        offset, group, last, column, there, next_column, rows_w, rows_s, NP, MMA,
                        STAGES, FP16, ASYMMETRIC, EVEN_N,
                    )  # fmt: skip
                    step += 1
                program = _program()
                over = last < (part + 1) * groups // PARTS
                slot = gl.where(over, tiles * PARTS + program, tile * PARTS + part)
                _keep(True, _sums(state, slot, HALF, BM), acc)
                _count(done + (gl.where(over, tiles + program, tile) * 2 + HALF), -2)
                if first > part * groups // PARTS:
                    _count(done + ((tiles + program - 1) * 2 + HALF), 1)
            else:
                if first > 0:
                    before = _program() - 1
                    _await(done + (before * 2 + HALF), 1)
                    if first_part > 0:
                        total.store(_fetch(True, _sums(state, before * 2 + 1, HALF, BM), none))
                low = first
                for part in range(first_part, _uniform(_piece_at(last - 1, groups, PARTS)) + 1):
                    resumed = low > part * groups // PARTS
                    acc = _fetch(resumed, _sums(state, (_program() - 1) * 2, HALF, BM), none)
                    high = min(last, (part + 1) * groups // PARTS)
                    for group in range(low, high):
                        acc, a, w, s, s_next, z = _group(
                            acc, a, w, s, s_next, z, step, none, ring, full, empty, words, scale,
                            offset, group, last, column, there, next_column, rows_w, rows_s, NP,
                            MMA, STAGES, FP16, ASYMMETRIC, EVEN_N,
                        )  # fmt: skip
                        step += 1
                    low = high
                    # Handed over inside a part: the total of the parts before it, and its own sum.
                    y = acc
                    over = high < (part + 1) * groups // PARTS
                    _keep(over, _sums(state, _program() * 2, HALF, BM), y)
                    if part > 0:
                        t = total.load(MMA)
                        y = gl.where(over, t, t + y)
                    total.store(y)
                if first > 0:
                    _count(done + ((_program() - 1) * 2 + HALF), 1)
                if last < groups:
                    _keep(True, _sums(state, _program() * 2 + 1, HALF, BM), total.load(MMA))
                    _count(done + (_program() * 2 + HALF), -2)
                else:
                    row, _ = _place(tile, row_tiles, column_tiles, BM)
                    _finish(total, bias, out, row, column, rows_s, M, N, MMA, BM, BIAS)
        if SIDE:
            _add_parts(
                state, done, bias, out, M, N, groups, row_tiles, column_tiles, start, stop, HALF,
                PARTS, BM, BIAS,
            )  # fmt: skip


# The row count must neither be a constant of a kernel nor choose between two compilations of it.
@gluon.jit(do_not_specialize=["M", "groups", "row_tiles", "column_tiles", "strided", "zero"])
def walk(
    x_at,
    words,
    scale,
    offset,
    bias,
    state,
    done,
    out,
    M,
    N,
    NP,
    groups,
    row_tiles,
    column_tiles,
    strided,
    zero,
    PARTS: gl.constexpr,
    CUT: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    FP16: gl.constexpr,
    ASYMMETRIC: gl.constexpr,
    BIAS: gl.constexpr,
    EVEN_N: gl.constexpr,
    PDL: gl.constexpr,
):
    """Each tile by one program, which walks the parts, but for what ``CUT`` says. Grid: one program
    a multiprocessor, or as many as there is work for, from ``ops.hopper.share``. Four warps are
    asked for; the others come with ``warp_specialize``.

    Args:
        x_at: Descriptor of x, [M, K] fp16 or bf16, in blocks [BM, 128]; K is groups * 128.
        words: [groups, NP, 16] int32; NP is N rounded up to 64.
        scale: [groups, NP], the dtype of x.
        offset: [groups, NP] int32, the zero points as ``int4_linear._pairs_cuda`` takes them;
            unread if not ASYMMETRIC.
        bias: [N], unread if not BIAS.
        state: fp32 sums that programs hand on; ``ops.hopper.share`` says how many.
        done: int32 zeros, left as zeros; likewise.
        out: [M, N], the dtype of x.
        groups: At least 2 * PARTS, as words are loaded two groups ahead; 3 * PARTS where parts are
            shared, and 3 where tiles are.
        row_tiles: M / BM, rounded up.
        column_tiles: N / BN, rounded up.
        strided: Tiles that are not shared; unread if not CUT.
        zero: 0.
        CUT: "" if no tile is shared, ``tiles`` or ``parts``. Each has its own code around the loop
            over groups: what the compiler makes of that loop hangs on little.
        BM: Rows of a tile, 64 or 128.
        STAGES: Groups of x in the ring.
        EVEN_N: NP is a multiple of BN.
        PDL: It may start while the kernel before it ends (``overlap``): its first words are loaded
            then, for no kernel of a step writes a weight; all else comes after the wait.
    """
    ring = gl.allocate_shared_memory(x_at.dtype, [STAGES, BM, 128], x_at.layout)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64, BM], _total_layout(BM))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    # The TMA unit, and the other warps, see initialised barriers.
    fence_async_shared()
    _barrier()
    gl.warp_specialize(
        [
            (_consume, (x_at, ring, full, empty, totals, words, scale, offset, bias, state, done,
                        out, M, N, NP, groups, row_tiles, column_tiles, strided, zero, 0, PARTS,
                        CUT, BM, STAGES, FP16, ASYMMETRIC, BIAS, EVEN_N, PDL)),
            (_consume, (x_at, ring, full, empty, totals, words, scale, offset, bias, state, done,
                        out, M, N, NP, groups, row_tiles, column_tiles, strided, zero, 1, PARTS,
                        CUT, BM, STAGES, FP16, ASYMMETRIC, BIAS, EVEN_N, PDL)),
            (_produce, (x_at, ring, full, empty, words, NP, groups, row_tiles, column_tiles,
                        strided, PARTS, CUT, BM, STAGES, PDL)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
