"""The argmax of a symmetric 4-bit weight with fewer instructions a value, for drafts on CUDA.

A draft decides no token, so its arithmetic need not be that of ``kernels.int4_linear``, whose
unpacking keeps it from the speed of memory. Here no zero point is subtracted from a value. The
words are those of ``ops.int4_words``; ``high`` are the k with bit 3 set, as there:

    e[m]       = 14 less the exponent of the largest |x[m, k]|, at most 126
    h[m, k]    = x[m, k] * 2**e[m], rounded to fp16
    o[m, g]    = sum over k of group g of (72 if high else 1032) * h[m, k], exact, rounded to fp32
    p[m, n, g] = sum over k of group g, ascending 16 at a time, of
                 ((64 if high else 1024) + q[k, n]) * h[m, k]
    acc[m, n]  = sum over the groups of a part, ascending, of (p - o) * scale[n]
    y[m, n]    = (sum over parts, ascending, of acc) * 2**-e[m], rounded to the dtype of x

All sums but o are fp32. The product with the scale and its addition are one rounding; the
interpreter, which has no fused multiply-add, makes two. A row with an infinity or a NaN has NaN
alone. A logit is a function of one row of x and one column, the same in every tile and launch.

64 + q and 1024 + q are bits of a word and an exponent in fp16, which takes a nibble at bit 0 and
one at bit 4: of the four pairs of a word only two need a shift. bfloat16 has fewer bits, so x
becomes fp16. It is scaled by a power of two, so that its largest value lies in [2**14, 2**15): one
2**31 times smaller still keeps all bits of a bfloat16. What the fp32 sums lose to the offsets,
some 2**-13 of the sum of a group's |h|, is far less than what rounding a logit loses.
"""

import triton
import triton.language as tl

from vllm_b70.kernels import linear
from vllm_b70.kernels.int4_linear import fetch_words, in_order
from vllm_b70.kernels.overlap import let_next_start, wait


@triton.jit(do_not_specialize=["M", "MP", "groups"])
def prepare(
    x, half, offset, unit, M, MP, K, groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What the argmax reads of x. Grid (M,).

    Args:
        x: [M, K] fp16 or bf16; K is whole groups.
        half: [M, K] fp16, filled with h.
        offset: [groups, MP] fp32, whose first M columns are filled with o.
        unit: [M] fp32, filled with 2**-e.
        GROUPS: A power of two that is at least ``groups``.
        PDL: The argmax may start at once, to fetch words. This one itself has started late.
    """
    if PDL:
        let_next_start()
    row = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = row.to(tl.int64) * K + k
    v = tl.load(x + at, mask=k < K, other=0.0).to(tl.float32)
    # The bits of absolute values are ordered as they are, with infinity and then NaN above all.
    exponent = tl.max(tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0) >> 23
    finite = exponent < 255
    field = tl.minimum(127 + 14 + 127 - exponent, 127 + 126)
    h = (v * (field << 23).to(tl.float32, bitcast=True)).to(tl.float16)
    tl.store(half + at, h, mask=k < K)
    # Times 2**24, an fp16 is an integer, and integers add up to the same in any order.
    whole = (tl.where(finite, h.to(tl.float32), 0.0) * 2.0**24).to(tl.int64)
    o = tl.sum(whole * tl.where((k & 8) > 0, 72, 1032), axis=1).to(tl.float32) * 2.0**-24
    tl.store(offset + group * MP + row, tl.where(finite, o, float("nan")), mask=group < groups)
    tl.store(unit + row, ((2 * 127 - field) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _pairs_cuda(words):
    """The eight values of each word, with their offsets, by packed PTX instructions."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, e;
        lop3.b32 a, $8, 0x000f000f, 0x64006400, 0xEA;
        lop3.b32 b, $8, 0x00f000f0, 0x54005400, 0xEA;
        shr.u32 e, $8, 8;
        lop3.b32 c, e, 0x000f000f, 0x64006400, 0xEA;
        lop3.b32 d, e, 0x00f000f0, 0x54005400, 0xEA;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(tl.float16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _value(words, SHIFT: tl.constexpr, HIGH: tl.constexpr):
    if HIGH:
        bits = ((words >> SHIFT) & 0xF0) | 0x5400
    else:
        bits = ((words >> SHIFT) & 0xF) | 0x6400
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _pairs(words):
    """``_pairs_cuda`` in plain Triton; the same values."""
    return (
        _value(words, 0, False),
        _value(words, 16, False),
        _value(words, 0, True),
        _value(words, 16, True),
        _value(words, 8, False),
        _value(words, 24, False),
        _value(words, 8, True),
        _value(words, 24, True),
    )


@triton.jit
def _weight(words, BN: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr):
    """[BN, GROUP / 8] words as [BN, GROUP] fp16 in ascending k; registers are only renamed."""
    if PTX:
        a0, a1, b0, b1, c0, c1, d0, d1 = _pairs_cuda(words)
    else:
        a0, a1, b0, b1, c0, c1, d0, d1 = _pairs(words)
    return in_order(a0, a1, b0, b1, c0, c1, d0, d1, BN, GROUP)


@triton.jit
def _scales(pairs, odd, FP16: tl.constexpr):
    """The even or the odd half of each pair of scales, in fp32."""
    bits = pairs >> (odd * 16)
    if FP16:
        s = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        s = (bits << 16).to(tl.float32, bitcast=True)
    return s


@triton.jit
def _part(
    half,
    words,
    scale,
    offset,
    rows_n,
    rows_m,
    M,
    MP,
    NP,
    K,
    first,
    last,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    EVEN_N: tl.constexpr,
    PTX: tl.constexpr,
):
    """acc of the groups first to last, ascending; [BN, BM] fp32.

    What the matrix unit does not take is loaded one group ahead, into registers: Triton's pipeliner
    leaves it out, and each group would wait for memory. Of scales a thread loads the pair that its
    own is in: of two of 16 bits the compiler makes one register at once, which is to wait for them.
    """
    in_m, in_n = (rows_m < M)[None, :], rows_n < NP
    word_at = words + rows_n[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    half_at = half + rows_m.to(tl.int64)[None, :] * K + tl.arange(0, GROUP)[:, None]
    scale_at = scale.to(tl.pointer_type(tl.int32)) + rows_n // 2
    offset_at = offset + rows_m
    odd = rows_n % 2
    acc = tl.zeros((BN, BM), tl.float32)
    pairs = tl.load(scale_at + first * NP // 2, mask=in_n, other=0)
    o = tl.load(offset_at + first * MP)
    for group in range(first, last):
        if EVEN_N:
            w = tl.load(word_at + group * NP * (GROUP // 8))
        else:
            w = tl.load(word_at + group * NP * (GROUP // 8), mask=in_n[:, None], other=0)
        h = tl.load(half_at + group * GROUP, mask=in_m, other=0.0)
        p = tl.dot(_weight(w, BN, GROUP, PTX), h, out_dtype=tl.float32)
        s = tl.broadcast_to(_scales(pairs, odd, FP16)[:, None], (BN, BM))
        acc = tl.fma(p - o[None, :], s, acc)
        # After the last group there is nothing to load.
        following = tl.minimum(group + 1, last - 1)
        pairs = tl.load(scale_at + following * NP // 2, mask=in_n, other=0)
        o = tl.load(offset_at + following * MP)
    return acc


# The row count must neither be a constant of a kernel nor choose between two compilations of it.
@triton.jit(do_not_specialize=["M", "groups"])
def argmax(
    half,
    words,
    scale,
    offset,
    unit,
    best,
    M,
    MP,
    N,
    NP,
    K,
    groups,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    EVEN_N: tl.constexpr,
    PTX: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best column of each row and column tile.

    Grid (M / BM, N / BN), so that row tiles share the weight in the cache.

    Args:
        half, offset, unit: From ``prepare``. Rows of offset past M hold anything.
        words: [groups, NP, GROUP / 8] int32; NP is N rounded up to 64. Symmetric.
        scale: [groups, NP], fp16 if FP16, else bf16; on a border of 4 bytes.
        best: [N / BN, M] int64, the rank of the best column (``linear.rank``) among those of the
            tile.
        MP: M rounded up to 64; a multiple of BM.
        PARTS: The K partition.
        PTX: Use packed PTX instructions instead of plain Triton; the same values.
        AHEAD: As for ``int4_linear.split``.
    """
    row, column = tl.program_id(0), tl.program_id(1)
    rows_n = column * BN + tl.arange(0, BN)
    rows_m = row * BM + tl.arange(0, BM)
    if PDL:
        if AHEAD > 0:
            fetch_words(words, column * BN, 0, groups, NP, GROUP, BN, AHEAD)
        wait()
        let_next_start()
    y = _part(
        half, words, scale, offset, rows_n, rows_m, M, MP, NP, K, 0, groups // PARTS,
        GROUP, BN, BM, FP16, EVEN_N, PTX,
    )  # fmt: skip
    for i in range(1, PARTS):
        y += _part(
            half, words, scale, offset, rows_n, rows_m, M, MP, NP, K,
            i * groups // PARTS, (i + 1) * groups // PARTS,
            GROUP, BN, BM, FP16, EVEN_N, PTX,
        )  # fmt: skip
    y *= tl.load(unit + rows_m, mask=rows_m < M, other=0.0)[None, :]
    y = y.to(tl.float16 if FP16 else tl.bfloat16).to(tl.float32)
    # Ranks, of 64 bits, are made of a tile's best alone: those of all columns would take many
    # registers. Columns past N, after all others, are minus infinity as NaN is.
    n = rows_n[:, None]
    y = tl.where((y == y) & (n < N), y, float("-inf"))
    top = tl.max(y, axis=0)
    lowest = tl.min(tl.where(y == top[None, :], n, 0x7FFFFFFF), axis=0)
    tl.store(best + column.to(tl.int64) * M + rows_m, linear.rank(top, lowest), mask=rows_m < M)


@triton.jit(do_not_specialize=["M", "tiles"])
def best_of(best, value, index, M, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``linear.best_of``, which may start while ``argmax`` still runs."""
    if PDL:
        wait()
        let_next_start()
    linear.best_of(best, value, index, M, tiles, BLOCK)
