"""W4A16 GEMM with one K partition for every row count.

    part[m, n] = sum over k of a group, ascending 16 at a time, of (q[k, n] - z[n]) * x[m, k]
    acc[m, n]  = sum over the groups of a part, ascending, of part * scale[n]
    y[m, n]    = sum over parts, ascending, of acc;  out = round(y + bias)

The parts of a weight are an argument and never follow the row count. The kernels compute the same
bits: ``split`` lets one program compute one part and the last to finish add them in index order;
``walk`` lets one program walk all parts; ``argmax``, for XPU, is a walk that keeps the best column
of a tile instead of storing its logits. Tiles, warps and stages are free.

The weight goes from the packed words to the matrix unit through registers only. On CUDA it is
the left operand, so that few rows cost a narrow tile. On XPU (LEFT) the rows are the left operand,
of which its matrix unit takes eight at a time. Either way the same products are added in the same
order. The words hold, for each thread of a CUDA fragment, just the values that this thread feeds
(``ops.int4_words`` makes them):

    k = 32 * block + 16 * half + 8 * high + 2 * lane + low
    word index = lane * (group / 32) + block,   bit offset = 16 * low + 8 * half + 4 * high

so that two values at a time are cut out by one shift and one three-way logic operation, which also
sets the exponent that turns them into 16-bit floats, 1024 + q or 128 + q. In an XPU fragment a
thread feeds one column and all of its k: it loads the words of the four lanes one after another,
and joining them is a renaming of registers.
"""

import triton
import triton.language as tl

from vllm_b70.kernels.blocks import POINTERS, advance_block, load_block, make_block
from vllm_b70.kernels.linear import rank
from vllm_b70.kernels.overlap import fetch, let_next_start, wait


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
    q = (words >> SHIFT) & 15
    if FP16:
        # 1024 + q less 1024 + z: fewer and narrower instructions than converting an integer.
        value = (q | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - zero
    else:
        value = (q - zero).to(tl.float32).to(tl.bfloat16)
    return value


@triton.jit
def _pairs(words, offset, FP16: tl.constexpr):
    """``_pairs_cuda`` in plain Triton; the same values."""
    if FP16:
        zero = offset.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        zero = offset & 0xFF  # 128 + z is 0x4300 + z
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
def in_order(a0, a1, b0, b1, c0, c1, d0, d1, BN: tl.constexpr, GROUP: tl.constexpr):
    """The eight values of each of [BN, GROUP / 8] words, by half, high and low, as [BN, GROUP] in
    ascending k: registers are only renamed."""
    first = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    second = tl.join(tl.join(c0, c1), tl.join(d0, d1))
    w = tl.join(first, second)  # row, word, low, high, half
    w = tl.reshape(w, (BN, 4, GROUP // 32, 2, 2, 2))  # row, lane, block, low, high, half
    w = tl.permute(w, (0, 2, 5, 4, 1, 3))  # row, block, half, high, lane, low
    return tl.reshape(w, (BN, GROUP))


@triton.jit
def _weight(
    words, offset, BN: tl.constexpr, GROUP: tl.constexpr, FP16: tl.constexpr, PTX: tl.constexpr
):
    """[BN, GROUP / 8] words as [BN, GROUP] floats in ascending k."""
    if PTX:
        a0, a1, b0, b1, c0, c1, d0, d1 = _pairs_cuda(words, offset, FP16)
    else:
        a0, a1, b0, b1, c0, c1, d0, d1 = _pairs(words, offset, FP16)
    return in_order(a0, a1, b0, b1, c0, c1, d0, d1, BN, GROUP)


@triton.jit
def _eights(at, offset, in_n, FP16: tl.constexpr, EVEN_N: tl.constexpr):
    """The words at ``at``, [BN, n], as floats: [BN, n, low, high, half]."""
    if EVEN_N:
        w = tl.load(at)
    else:
        w = tl.load(at, mask=in_n, other=0)
    a0, a1, b0, b1, c0, c1, d0, d1 = _pairs(w, offset, FP16)
    first = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    second = tl.join(tl.join(c0, c1), tl.join(d0, d1))
    return tl.join(first, second)


@triton.jit
def _weight_right(
    at,
    offset,
    in_n,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    BN: tl.constexpr,
    FP16: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """The words from ``at`` on, [BN, 1] pointers, as [STEP, BN] floats in ascending k.

    Each load is of neighbouring words, so that the compiler gives a thread whole columns; and there
    is no ``tl.trans``, because it takes a transposed operand through shared memory.
    """
    if GROUP == 32:
        # One block, so that the four lanes are neighbours.
        w = _eights(at + tl.arange(0, 4)[None, :], offset, in_n, FP16, EVEN_N)
        w = tl.permute(w, (4, 3, 1, 2, 0))  # half, high, lane, low, row
    else:
        at += tl.arange(0, STEP // 32)[None, :]
        w0 = _eights(at, offset, in_n, FP16, EVEN_N)
        w1 = _eights(at + GROUP // 32, offset, in_n, FP16, EVEN_N)
        w2 = _eights(at + 2 * (GROUP // 32), offset, in_n, FP16, EVEN_N)
        w3 = _eights(at + 3 * (GROUP // 32), offset, in_n, FP16, EVEN_N)
        w = tl.join(tl.join(w0, w1), tl.join(w2, w3))
        # Block, half, high, lane >> 1, lane & 1, low, row.
        w = tl.permute(w, (1, 4, 3, 6, 5, 2, 0))
    return tl.reshape(w, (STEP, BN))


@triton.jit
def _rows(x_at, k, in_m, K, STEP: tl.constexpr, EVEN_K: tl.constexpr):
    """[BM, STEP] of x from k on."""
    if EVEN_K:
        x = tl.load(x_at + k, mask=in_m, other=0.0)
    else:
        in_k = (k + tl.arange(0, STEP) < K)[None, :]
        x = tl.load(x_at + k, mask=in_m & in_k, other=0.0)
    return x


@triton.jit
def _part_rows_left(
    x,
    words,
    scale,
    offset,
    rows_n,
    rows_m,
    first_row,
    M,
    NP,
    K,
    first,
    last,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum over groups first to last, ascending; [BM, BN] fp32. A group is cut into steps, whose
    products continue one sum."""
    acc = tl.zeros((BM, BN), tl.float32)
    rows_k = tl.arange(0, STEP)
    in_m = (rows_m < M)[:, None]
    in_n = rows_n < NP
    middle = 0x64086408 if FP16 else 0x43084308
    word_at = words + rows_n[:, None] * (GROUP // 8)
    symmetric = tl.full((BN, 1), middle, tl.int32)
    x_at = x + rows_m.to(tl.int64)[:, None] * K + rows_k[None, :]
    if BLOCK:
        x_block = make_block(x, M, K, first_row, first * GROUP, BM, STEP)
    for group in range(first, last):
        if EVEN_N:
            s = tl.load(scale + group * NP + rows_n)
        else:
            s = tl.load(scale + group * NP + rows_n, mask=in_n, other=0.0)
        if ASYMMETRIC:
            z = tl.load(offset + group * NP + rows_n, mask=in_n, other=middle)[:, None]
        else:
            z = symmetric
        at = word_at + group * NP * (GROUP // 8)
        if STEP == GROUP:
            if BLOCK:
                xs = load_block(x_block, first_row, group * GROUP)
                if POINTERS:
                    x_block = advance_block(x_block, GROUP)
            else:
                xs = _rows(x_at, group * GROUP, in_m, K, STEP, EVEN_K)
            w = _weight_right(at, z, in_n[:, None], GROUP, STEP, BN, FP16, EVEN_N)
            p = tl.dot(xs, w, out_dtype=tl.float32)
        else:
            p = tl.zeros((BM, BN), tl.float32)
            if BLOCK:
                x_block = make_block(x, M, K, first_row, group * GROUP, BM, STEP)
            for step in tl.range(0, GROUP // STEP):
                if BLOCK:
                    xs = load_block(x_block, first_row, group * GROUP + step * STEP)
                    if POINTERS:
                        x_block = advance_block(x_block, STEP)
                else:
                    xs = _rows(x_at, group * GROUP + step * STEP, in_m, K, STEP, EVEN_K)
                w = _weight_right(
                    at + step * (STEP // 32), z, in_n[:, None], GROUP, STEP, BN, FP16, EVEN_N
                )
                p = tl.dot(xs, w, p, out_dtype=tl.float32)
        # Two roundings: launches switch fusion off, so that no kernel makes one of them.
        acc += p * s.to(tl.float32)[None, :]
    return acc


@triton.jit
def _part_weight_left(
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
    """The sum over groups first to last, ascending; [BN, BM] fp32."""
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
def _part(
    x,
    words,
    scale,
    offset,
    rows_n,
    rows_m,
    first_row,
    M,
    NP,
    K,
    first,
    last,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PTX: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One part of the K partition: [BM, BN] if LEFT, else [BN, BM]. Shared by both kernels."""
    if LEFT:
        part = _part_rows_left(
            x, words, scale, offset, rows_n, rows_m, first_row, M, NP, K, first, last,
            GROUP, STEP, BN, BM, FP16, ASYMMETRIC, EVEN_N, EVEN_K, BLOCK,
        )  # fmt: skip
    else:
        part = _part_weight_left(
            x, words, scale, offset, rows_n, rows_m, M, NP, K, first, last,
            GROUP, BN, BM, FP16, ASYMMETRIC, EVEN_N, EVEN_K, PTX,
        )  # fmt: skip
    return part


@triton.jit
def _parts(
    x, words, scale, offset, rows_n, rows_m, first_row, M, NP, K, groups,
    PARTS: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, FP16: tl.constexpr, ASYMMETRIC: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PTX: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over all parts, each by ``_part``, in index order."""
    y = _part(
        x, words, scale, offset, rows_n, rows_m, first_row, M, NP, K, 0, groups // PARTS,
        GROUP, STEP, BN, BM, FP16, ASYMMETRIC, EVEN_N, EVEN_K, PTX, LEFT, BLOCK,
    )  # fmt: skip
    for i in range(1, PARTS):
        y += _part(
            x, words, scale, offset, rows_n, rows_m, first_row, M, NP, K,
            i * groups // PARTS, (i + 1) * groups // PARTS,
            GROUP, STEP, BN, BM, FP16, ASYMMETRIC, EVEN_N, EVEN_K, PTX, LEFT, BLOCK,
        )  # fmt: skip
    return y


@triton.jit
def fetch_words(
    words, column, first, last, NP,
    GROUP: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Bring the words of the first AHEAD values of k of a part, for BN columns, to the L2.

    Before the wait for the kernel before this one: no kernel of a step writes a weight.
    """
    WORDS: tl.constexpr = GROUP // 8
    LINE: tl.constexpr = 32
    groups = tl.minimum(first + tl.arange(0, AHEAD // GROUP), last - 1)
    lines = column * WORDS + tl.arange(0, BN * WORDS // LINE) * LINE
    lines = tl.minimum(lines, NP * WORDS - 1)
    fetch(words + groups.to(tl.int64)[:, None] * NP * WORDS + lines[None, :])


@triton.jit
def _places(rows_n, rows_m, M, N, LEFT: tl.constexpr):
    """Where a tile of the output lies, and which of its elements exist."""
    if LEFT:
        at = rows_m.to(tl.int64)[:, None] * N + rows_n[None, :]
        mask = (rows_m < M)[:, None] & (rows_n < N)[None, :]
    else:
        at = rows_m.to(tl.int64)[None, :] * N + rows_n[:, None]
        mask = (rows_m < M)[None, :] & (rows_n < N)[:, None]
    return at, mask


@triton.jit
def _finish(out, bias, y, rows_n, rows_m, M, N, BIAS: tl.constexpr, LEFT: tl.constexpr):
    if BIAS:
        b = tl.load(bias + rows_n, mask=rows_n < N, other=0.0).to(tl.float32)
        if LEFT:
            y += b[None, :]
        else:
            y += b[:, None]
    at, mask = _places(rows_n, rows_m, M, N, LEFT)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


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
    STEP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PTX: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
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
        STEP: Values of k multiplied at once, 64 or GROUP; unread if not LEFT.
        LEFT: The rows are the left operand (XPU). The same bits.
        BLOCK: Load x by 2D blocks, if ``ops.blocks.fits``; unread if not LEFT.
        AHEAD: Values of k of its part, 0 or at least a group and a power of two, whose words a
            program that may start early asks for before it waits.
    """
    column, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows_n = column * BN + tl.arange(0, BN)
    rows_m = row * BM + tl.arange(0, BM)
    first, last = part * groups // PARTS, (part + 1) * groups // PARTS
    if PDL:
        if AHEAD > 0:
            fetch_words(words, column * BN, first, last, NP, GROUP, BN, AHEAD)
        wait()
        let_next_start()
    y = _part(
        x, words, scale, offset, rows_n, rows_m, row * BM, M, NP, K, first, last,
        GROUP, STEP, BN, BM, FP16, ASYMMETRIC, EVEN_N, EVEN_K, PTX, LEFT, BLOCK,
    )  # fmt: skip
    if PARTS == 1:
        _finish(out, bias, y, rows_n, rows_m, M, N, BIAS, LEFT)
    else:
        at, mask = _places(rows_n, rows_m, M, N, LEFT)
        size = M.to(tl.int64) * N
        tl.store(partial + part * size + at, y, mask=mask)
        # All stores of this program come before its count, and the last program's loads after it.
        tl.debug_barrier()
        counter = done + row * tl.num_programs(0) + column
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            tl.debug_barrier()
            y = tl.load(partial + at, mask=mask, other=0.0, cache_modifier=".cg")
            for i in tl.static_range(1, PARTS):
                y += tl.load(partial + i * size + at, mask=mask, other=0.0, cache_modifier=".cg")
            _finish(out, bias, y, rows_n, rows_m, M, N, BIAS, LEFT)
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
    STEP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PTX: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Many rows: one program walks the parts. Grid (rows / BM, columns / BN); else as ``split``."""
    row, column = tl.program_id(0), tl.program_id(1)
    rows_n = column * BN + tl.arange(0, BN)
    rows_m = row * BM + tl.arange(0, BM)
    if PDL:
        if AHEAD > 0:
            fetch_words(words, column * BN, 0, groups, NP, GROUP, BN, AHEAD)
        wait()
        let_next_start()
    y = _parts(
        x, words, scale, offset, rows_n, rows_m, row * BM, M, NP, K, groups, PARTS,
        GROUP, STEP, BN, BM, FP16, ASYMMETRIC, EVEN_N, EVEN_K, PTX, LEFT, BLOCK,
    )  # fmt: skip
    _finish(out, bias, y, rows_n, rows_m, M, N, BIAS, LEFT)


@triton.jit(do_not_specialize=["M", "groups"])
def argmax(
    x,
    words,
    scale,
    best,
    M,
    N,
    NP,
    K,
    groups,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FP16: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best column of each row and column tile of a symmetric weight whose K is whole groups.

    The rows are the left operand. Grid (M / BM, N / BN), so that row tiles share the weight in the
    cache; else as ``walk``.

    Args:
        best: [N / BN, M] int64, the rank of the best column (``linear.rank``) among those of the
            tile; its values are rounded to the dtype of x first, as a row of logits would be.
    """
    row, column = tl.program_id(0), tl.program_id(1)
    rows_n = column * BN + tl.arange(0, BN)
    rows_m = row * BM + tl.arange(0, BM)
    y = _parts(
        x, words, scale, words, rows_n, rows_m, row * BM, M, NP, K, groups, PARTS,
        GROUP, STEP, BN, BM, FP16, False, EVEN_N, True, False, True, BLOCK,
    )  # fmt: skip
    n = rows_n[None, :]
    ranks = rank(y.to(tl.float16 if FP16 else tl.bfloat16).to(tl.float32), n)
    # Below every rank of a column: the lowest order of a value is that of minus infinity.
    ranks = tl.where(n < N, ranks, -0x8000000000000000)
    tl.store(best + column.to(tl.int64) * M + rows_m, tl.max(ranks, axis=1), mask=rows_m < M)
