"""W4A16 GEMM with one K partition for every row count.

    part[m, n] = sum over k of a group, ascending 16 at a time, of (q[k, n] - z[n]) * x[m, k]
    acc[m, n]  = sum over the groups of a part, ascending, of part * scale[n]
    y[m, n]    = sum over parts, ascending, of acc;  out = round(y + bias)

The parts of a weight are an argument and never follow the row count. Two kernels compute the same
bits: ``split`` lets one program compute one part and the last to finish add them in index order;
``walk`` lets one program walk all parts. Tiles, warps and stages are free.

The operands are swapped: the weight is the left operand and goes from the packed words to the
matrix unit through registers only. For that the words hold, for each thread of a matrix fragment,
just the values that this thread feeds (``ops.int4_words`` makes them):

    k = 32 * block + 16 * half + 8 * high + 2 * lane + low
    word index = lane * (group / 32) + block,   bit offset = 16 * low + 8 * half + 4 * high

so that two values at a time are cut out by one shift and one three-way logic operation, which also
sets the exponent that turns them into 16-bit floats, 1024 + q or 128 + q.
"""

import triton
import triton.language as tl


@triton.jit
def _pairs_cuda(words, offset, FP16: tl.constexpr):
    """The eight values of each word as floats less the zero point, by packed PTX instructions.

    offset holds 1024 + z (fp16) or 128 + z (bf16) in both halves.
    """
    if FP16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, e, f, g;
            shr.u32 e, $8, 4;
            shr.u32 f, $8, 8;
            shr.u32 g, $8, 12;
            lop3.b32 a, $8, 0x000f000f, 0x64006400, 0xEA;
            lop3.b32 b, e, 0x000f000f, 0x64006400, 0xEA;
            lop3.b32 c, f, 0x000f000f, 0x64006400, 0xEA;
            lop3.b32 d, g, 0x000f000f, 0x64006400, 0xEA;
            sub.f16x2 a, a, $9;
            sub.f16x2 b, b, $9;
            sub.f16x2 c, c, $9;
            sub.f16x2 d, d, $9;
            mov.b32 {$0, $1}, a;
            mov.b32 {$2, $3}, b;
            mov.b32 {$4, $5}, c;
            mov.b32 {$6, $7}, d;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, offset],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, e, f, g;
            shr.u32 e, $8, 4;
            shr.u32 f, $8, 8;
            shr.u32 g, $8, 12;
            lop3.b32 a, $8, 0x000f000f, 0x43004300, 0xEA;
            lop3.b32 b, e, 0x000f000f, 0x43004300, 0xEA;
            lop3.b32 c, f, 0x000f000f, 0x43004300, 0xEA;
            lop3.b32 d, g, 0x000f000f, 0x43004300, 0xEA;
            sub.bf16x2 a, a, $9;
            sub.bf16x2 b, b, $9;
            sub.bf16x2 c, c, $9;
            sub.bf16x2 d, d, $9;
            mov.b32 {$0, $1}, a;
            mov.b32 {$2, $3}, b;
            mov.b32 {$4, $5}, c;
            mov.b32 {$6, $7}, d;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, offset],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _value(words, zero, SHIFT: tl.constexpr, FP16: tl.constexpr):
    q = ((words >> SHIFT) & 15) - zero
    q = q.to(tl.float32)
    return q.to(tl.float16) if FP16 else q.to(tl.bfloat16)


@triton.jit
def _pairs(words, offset, FP16: tl.constexpr):
    """``_pairs_cuda`` in plain Triton; the same values."""
    # 1024 + z is 0x6400 + z in fp16, 128 + z is 0x4300 + z in bf16.
    zero = offset & 0xFF
    return (
        _value(words, zero, 0, FP16),
        _value(words, zero, 16, FP16),
        _value(words, zero, 4, FP16),
        _value(words, zero, 20, FP16),
        _value(words, zero, 8, FP16),
        _value(words, zero, 24, FP16),
        _value(words, zero, 12, FP16),
        _value(words, zero, 28, FP16),
    )


@triton.jit
def _weight(
    words, offset, BN: tl.constexpr, GROUP: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr
):
    """[BN, GROUP / 8] words as [BN, GROUP] floats in ascending k; registers are only renamed."""
    if PTX:
        a0, a1, b0, b1, c0, c1, d0, d1 = _pairs_cuda(words, offset, FP16)
    else:
        a0, a1, b0, b1, c0, c1, d0, d1 = _pairs(words, offset, FP16)
    first = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    second = tl.join(tl.join(c0, c1), tl.join(d0, d1))
    w = tl.join(first, second)  # row, word, low, high, half
    w = tl.reshape(w, (BN, 4, GROUP // 32, 2, 2, 2))  # row, lane, block, low, high, half
    w = tl.permute(w, (0, 2, 5, 4, 1, 3))  # row, block, half, high, lane, low
    return tl.reshape(w, (BN, GROUP))


@triton.jit
def _part(
    x,
    words,
    scale,
    offset,
    rows_n,
    rows_m,
    M,
    NP,
    K,
    first,
    last,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PTX: tl.constexpr,
):
    """The sum over groups first to last, ascending; [BN, BM] fp32. Shared by both kernels."""
    acc = tl.zeros((BN, BM), tl.float32)
    rows_k = tl.arange(0, GROUP)
    word_at = words + rows_n[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    x_at = x + rows_m.to(tl.int64)[None, :] * K + rows_k[:, None]
    in_m = (rows_m < M)[None, :]
    in_n = rows_n < NP
    middle = 0x64086408 if FP16 else 0x43084308
    symmetric = tl.full((BN, 1), middle, tl.int32)
    for group in range(first, last):
        if EVEN_N:
            w = tl.load(word_at + group * NP * (GROUP // 8))
            s = tl.load(scale + group * NP + rows_n)
        else:
            w = tl.load(word_at + group * NP * (GROUP // 8), mask=in_n[:, None], other=0)
            s = tl.load(scale + group * NP + rows_n, mask=in_n, other=0.0)
        if ASYMMETRIC:
            z = tl.load(offset + group * NP + rows_n, mask=in_n, other=middle)[:, None]
        else:
            z = symmetric
        if EVEN_K:
            xt = tl.load(x_at + group * GROUP, mask=in_m, other=0.0)
        else:
            in_k = (group * GROUP + rows_k < K)[:, None]
            xt = tl.load(x_at + group * GROUP, mask=in_m & in_k, other=0.0)
        p = tl.dot(_weight(w, z, BN, GROUP, FP16, PTX), xt, out_dtype=tl.float32)
        # Two roundings: launches switch fusion off, so that no kernel makes one of them.
        acc += p * s.to(tl.float32)[:, None]
    return acc


@triton.jit
def _finish(out, bias, y, rows_n, rows_m, M, N, BIAS: tl.constexpr):
    if BIAS:
        y += tl.load(bias + rows_n, mask=rows_n < N, other=0.0).to(tl.float32)[:, None]
    at = rows_m.to(tl.int64)[None, :] * N + rows_n[:, None]
    tl.store(
        out + at, y.to(out.dtype.element_ty), mask=(rows_m < M)[None, :] & (rows_n < N)[:, None]
    )


# The row count must neither be a constant of a kernel nor choose between two compilations of it.
@triton.jit(do_not_specialize=["M", "groups"])
def split(
    x,
    words,
    scale,
    offset,
    bias,
    partial,
    done,
    out,
    M,
    N,
    NP,
    K,
    groups,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PTX: tl.constexpr,
):
    """Few rows: the parts side by side. Grid (columns / BN, PARTS, rows / BM).

    Args:
        x: [M, K] fp16 or bf16.
        words: [groups, NP, GROUP / 8] int32; NP is N rounded up to 64.
        scale: [groups, NP], the dtype of x.
        offset: [groups, NP] int32, the zero points as ``_pairs_cuda`` takes them; unread if not
            ASYMMETRIC.
        bias: [N], unread if not BIAS.
        partial: [PARTS, M, N] fp32 workspace; its former content does not matter. Unread if PARTS
            is 1.
        done: [rows / BM * columns / BN] int32, zero before and after.
        out: [M, N], the dtype of x.
    """
    column, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows_n = column * BN + tl.arange(0, BN)
    rows_m = row * BM + tl.arange(0, BM)
    first, last = part * groups // PARTS, (part + 1) * groups // PARTS
    y = _part(
        x, words, scale, offset, rows_n, rows_m, M, NP, K, first, last,
        GROUP, BN, BM, FP16, ASYMMETRIC, EVEN_N, EVEN_K, PTX,
    )  # fmt: skip
    if PARTS == 1:
        _finish(out, bias, y, rows_n, rows_m, M, N, BIAS)
    else:
        at = rows_m.to(tl.int64)[None, :] * N + rows_n[:, None]
        size = M.to(tl.int64) * N
        mask = (rows_m < M)[None, :] & (rows_n < N)[:, None]
        tl.store(partial + part * size + at, y, mask=mask)
        # All stores of this program come before its count, and the last program's loads after it.
        tl.debug_barrier()
        counter = done + row * tl.num_programs(0) + column
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            tl.debug_barrier()
            y = tl.load(partial + at, mask=mask, other=0.0, cache_modifier=".cg")
            for i in tl.static_range(1, PARTS):
                y += tl.load(partial + i * size + at, mask=mask, other=0.0, cache_modifier=".cg")
            _finish(out, bias, y, rows_n, rows_m, M, N, BIAS)
            tl.store(counter, 0)


@triton.jit(do_not_specialize=["M", "groups"])
def walk(
    x,
    words,
    scale,
    offset,
    bias,
    out,
    M,
    N,
    NP,
    K,
    groups,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PTX: tl.constexpr,
):
    """Many rows: one program walks the parts. Grid (rows / BM, columns / BN); else as ``split``."""
    row, column = tl.program_id(0), tl.program_id(1)
    rows_n = column * BN + tl.arange(0, BN)
    rows_m = row * BM + tl.arange(0, BM)
    y = _part(
        x, words, scale, offset, rows_n, rows_m, M, NP, K, 0, groups // PARTS,
        GROUP, BN, BM, FP16, ASYMMETRIC, EVEN_N, EVEN_K, PTX,
    )  # fmt: skip
    for i in range(1, PARTS):
        y += _part(
            x, words, scale, offset, rows_n, rows_m, M, NP, K,
            i * groups // PARTS, (i + 1) * groups // PARTS,
            GROUP, BN, BM, FP16, ASYMMETRIC, EVEN_N, EVEN_K, PTX,
        )  # fmt: skip
    _finish(out, bias, y, rows_n, rows_m, M, N, BIAS)
