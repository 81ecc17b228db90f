"""The 4-bit head's argmax as one stream of its weight, for CUDA: the ranks of
``kernels.int4_linear.argmax``.

The arithmetic is stated there and is the same, with one part. What differs is when things are
loaded:

* A program walks the groups of all its column tiles in one loop, so that the next tile's words are
  on their way while a tile ends.
* The scales of a group are loaded one group ahead, into a register. Triton's pipeliner takes only
  what feeds the matrix unit: else each group waits for its scales from memory. A thread loads the
  pair that its scale is in: of two scales of 16 bits the compiler makes one register as soon as
  both are there, which is to wait for them.

So the counters of what is loaded must not follow the branch in which a tile ends: it belongs to the
pipeline's last stage, and they to its first.
"""

import triton
import triton.language as tl

from vllm_b70.kernels import linear
from vllm_b70.kernels.int4_linear import _weight
from vllm_b70.kernels.overlap import fetch, let_next_start, wait

#: Groups of a program's first tile that are brought to the L2 under the kernel before.
AHEAD = tl.constexpr(4)


@triton.jit
def _scales(pairs, odd, FP16: tl.constexpr):
    """The even or the odd half of each pair of scales, in fp32."""
    half = pairs >> (odd * 16)
    if FP16:
        s = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        s = (half << 16).to(tl.float32, bitcast=True)
    return s


# The row count must neither be a constant of a kernel nor choose between two compilations of it.
@triton.jit(do_not_specialize=["M", "groups"])
def stream(
    x,
    words,
    scale,
    best,
    M,
    N,
    NP,
    K,
    groups,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    EVEN_N: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best column of each row among those of a program's column tiles.

    Grid (M / BM, any number of programs up to that of column tiles), of which program p takes the
    column tiles p, p + programs, ...

    Args:
        x: [M, K] fp16 or bf16; K is whole groups.
        words: [groups, NP, GROUP / 8] int32; NP is N rounded up to 64. Symmetric.
        scale: [groups, NP], the dtype of x; on a border of 4 bytes.
        best: [programs, M] int64, ranks as ``linear.rank`` has them of values rounded to the dtype
            of x, as a row of logits would be.
    """
    row, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows_m = row * BM + tl.arange(0, BM)
    rows_n = tl.arange(0, BN)
    stride = programs * BN
    # What is loaded, and what is multiplied; both begin at the same place.
    group, column = 0, program * BN
    multiplied, ending = 0, program * BN
    if PDL:
        LINES: tl.constexpr = BN * GROUP // 256  # of 128 bytes, in the words of a group and tile
        line = tl.arange(0, AHEAD * LINES)
        begin = tl.minimum(line // LINES, groups - 1) * NP * (GROUP // 8)
        fetch(
            words
            + begin
            + tl.minimum(column * (GROUP // 8) + line % LINES * 32, NP * (GROUP // 8) - 1)
        )
        wait()
        let_next_start()
    in_m = (rows_m < M)[None, :]
    x_at = x + rows_m.to(tl.int64)[None, :] * K + tl.arange(0, GROUP)[:, None]
    word_at = words + (rows_n[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :])
    scale_at = scale.to(tl.pointer_type(tl.int32)) + rows_n // 2
    odd = rows_n % 2
    offset = tl.full((BN, 1), 0x64086408 if FP16 else 0x43084308, tl.int32)
    # Below every rank of a column: the lowest order of a value is that of minus infinity.
    found = tl.full((BM,), -0x8000000000000000, tl.int64)
    acc = tl.zeros((BN, BM), tl.float32)
    pairs = tl.load(scale_at + column // 2, mask=column + rows_n < NP, other=0)
    for _ in tl.range(0, tl.cdiv(tl.cdiv(N, BN) - program, programs) * groups):
        at = group * NP + column
        if EVEN_N:
            w = tl.load(word_at + at * (GROUP // 8))
        else:
            w = tl.load(word_at + at * (GROUP // 8), mask=(column + rows_n < NP)[:, None], other=0)
        xt = tl.load(x_at + group * GROUP, mask=in_m, other=0.0)
        p = tl.dot(_weight(w, offset, BN, GROUP, FP16, PTX), xt, out_dtype=tl.float32)
        # Two roundings: launches switch fusion off, so that no kernel makes one of them.
        acc += p * _scales(pairs, odd, FP16)[:, None]
        over = group == groups - 1
        group = tl.where(over, 0, group + 1)
        column = tl.where(over, column + stride, column)
        # After its use in this step, so that it can go into the same register. Past the last tile
        # there is nothing to load.
        pairs = tl.load(scale_at + (group * NP + column) // 2, mask=column + rows_n < NP, other=0)
        multiplied += 1
        if multiplied == groups:
            # Ranks, of 64 bits, are made of a tile's best alone: those of all columns would take
            # registers from the loop. Columns past N, after all others, are minus infinity as NaN.
            n = (ending + rows_n)[:, None]
            y = acc.to(tl.float16 if FP16 else tl.bfloat16).to(tl.float32)
            y = tl.where((y == y) & (n < N), y, float("-inf"))
            top = tl.max(y, axis=0)
            first = tl.min(tl.where(y == top[None, :], n, 0x7FFFFFFF), axis=0)
            found = tl.maximum(found, linear.rank(top, first))
            acc = tl.zeros((BN, BM), tl.float32)
            multiplied = 0
            ending += stride
    tl.store(best + program.to(tl.int64) * M + rows_m, found, mask=rows_m < M)


@triton.jit(do_not_specialize=["M", "programs"])
def best_of(best, value, index, M, programs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``linear.best_of``, which may start while ``stream`` still runs."""
    if PDL:
        wait()
        let_next_start()
    linear.best_of(best, value, index, M, programs, BLOCK)
