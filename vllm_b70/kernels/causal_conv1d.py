"""The causal convolution before the gated delta rule, of width 4, and silu.

``convolve`` is the arithmetic of one output, whoever computes it: the products of two 16-bit floats
are exact in fp32 and are added oldest input first. Tiles, warps and how many tokens share a launch
are free. ``steps`` serves rows past their prompt, ``prompts`` prompt chunks, whose rows it also
makes into what the chunked kernels take.

A request's history, its last 3 inputs, stands in the slot of its recurrent state.
"""

import triton
import triton.language as tl

from vllm_b70.kernels.gated_delta_rule import EPSILON, gates
from vllm_b70.kernels.overlap import let_next_start, wait

#: Inputs of one output.
WIDTH = 4


@triton.jit
def convolve(x0, x1, x2, x3, w0, w1, w2, w3):
    """silu of the sum over four inputs, oldest first, and four weights; fp32."""
    y = x0.to(tl.float32) * w0
    y = y + x1.to(tl.float32) * w1
    y = y + x2.to(tl.float32) * w2
    y = y + x3.to(tl.float32) * w3
    return y / (1.0 + tl.exp(-y))


@triton.jit(
    do_not_specialize=["slot_units", "columns"],
    do_not_specialize_on_alignment=["starts", "read", "table"],
)
def steps(
    x,
    weight,
    history,
    starts,
    read,
    table,
    out,
    slot_units,
    columns,
    D: tl.constexpr,
    X_ROW: tl.constexpr,
    TOKEN: tl.constexpr,
    CHANNEL: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows past their prompt, one token at a time. Grid (requests, D / BD).

    Args:
        x: [T, D], rows X_ROW apart, 16 bit.
        weight: [D, 4].
        history: [slots, 3, D] by the strides 8 * slot_units, TOKEN and CHANNEL, the dtype of x.
        starts, read, table: As for ``gated_delta_rule.advance``; a request whose ``read`` is not
            positive is left alone.
        out: [T, D] contiguous, the dtype of x; filled for the rows of advanced requests.
    """
    if PDL:
        wait()
    request = tl.program_id(0)
    slot = tl.load(read + request)
    if slot <= 0:
        return
    first = tl.load(starts + request)
    tokens = tl.load(starts + request + 1) - first
    first = first.to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    in_d = d < D
    distance = slot_units.to(tl.int64) * 8
    past = history + slot * distance + d * CHANNEL
    x0 = tl.load(past, mask=in_d, other=0.0)
    x1 = tl.load(past + TOKEN, mask=in_d, other=0.0)
    x2 = tl.load(past + 2 * TOKEN, mask=in_d, other=0.0)
    w0 = tl.load(weight + d * 4, mask=in_d, other=0.0).to(tl.float32)
    w1 = tl.load(weight + d * 4 + 1, mask=in_d, other=0.0).to(tl.float32)
    w2 = tl.load(weight + d * 4 + 2, mask=in_d, other=0.0).to(tl.float32)
    w3 = tl.load(weight + d * 4 + 3, mask=in_d, other=0.0).to(tl.float32)
    # The slot that was read may be one that is written: no store before every thread has loaded.
    tl.debug_barrier()
    if PDL:
        let_next_start()
    for t in range(tokens):
        x3 = tl.load(x + (first + t) * X_ROW + d, mask=in_d, other=0.0)
        y = convolve(x0, x1, x2, x3, w0, w1, w2, w3)
        tl.store(out + (first + t) * D + d, y.to(out.dtype.element_ty), mask=in_d)
        column = t - tokens + tl.minimum(tokens, columns)
        target = tl.load(table + request * columns + column, mask=column >= 0, other=0)
        if target > 0:
            kept = history + target * distance + d * CHANNEL
            tl.store(kept, x1, mask=in_d)
            tl.store(kept + TOKEN, x2, mask=in_d)
            tl.store(kept + 2 * TOKEN, x3, mask=in_d)
        x0, x1, x2 = x1, x2, x3


@triton.jit
def _input(x, history, at, d, in_tile, oldest, X_ROW: tl.constexpr, TOKEN: tl.constexpr):
    """Inputs at positions ``at`` of a chunk. Those before its start come from the history, and are
    0 before ``oldest``."""
    inside = at >= 0
    new = tl.load(x + at.to(tl.int64) * X_ROW + d, mask=in_tile & inside, other=0.0)
    old = tl.load(history + (at + 3) * TOKEN, mask=in_tile & (at < 0) & (at >= oldest), other=0.0)
    return tl.where(inside, new, old)


@triton.jit(
    do_not_specialize=["slot_units"],
    do_not_specialize_on_alignment=[
        "a", "b", "a_log", "dt_bias", "sources", "starts", "slots", "resumed", "chunks",
    ]
)  # fmt: skip
def prompts(
    x,
    a,
    b,
    a_log,
    dt_bias,
    weight,
    history,
    sources,
    starts,
    slots,
    resumed,
    chunks,
    q,
    k,
    v,
    decay,
    beta,
    slot_units,
    X_ROW: tl.constexpr,
    A_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    TOKEN: tl.constexpr,
    CHANNEL: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    GRID: tl.constexpr,
    BT: tl.constexpr,
):
    """Prompt chunks: convolution, norm of q and k, gates. Grid (chunks * GRID / BT, 2 * HK + HV).

    Args:
        x, a, b, a_log, dt_bias, weight, history: As for ``steps`` and ``gated_delta_rule.advance``;
            history is left holding the last inputs.
        sources: [N] int32, the row of ``x`` where each sequence's chunk starts.
        starts: [N + 1] int32, where it starts in the outputs.
        slots: [N] int32.
        resumed: [N] int32, 1; 0 where the sequence begins here and its slot must not be read.
        chunks: [chunks, 2] int32, a sequence and the number of one of its blocks of GRID tokens.
        q, k: [T, HK, K], the dtype of x, normalised.
        v: [T, HV, V], the dtype of x.
        decay, beta: [T, HV] fp32.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    PER: tl.constexpr = GRID // BT
    sequence = tl.load(chunks + 2 * (tile // PER))
    begin = tl.load(chunks + 2 * (tile // PER) + 1) * GRID + (tile % PER) * BT
    first = tl.load(starts + sequence)
    tokens = tl.load(starts + sequence + 1) - first
    if begin >= tokens:
        return
    source = tl.load(sources + sequence).to(tl.int64)
    slot = tl.load(slots + sequence).to(tl.int64)
    oldest = -3 * tl.load(resumed + sequence)

    i = tl.arange(0, BD)
    d = tl.where(head < 2 * HK, head * K, 2 * HK * K + (head - 2 * HK) * V) + i
    in_d = i < tl.where(head < 2 * HK, K, V)
    t = begin + tl.arange(0, BT)
    in_t = t < tokens
    in_tile = in_t[:, None] & in_d[None, :]
    rows = x + source * X_ROW
    past = history + slot * (slot_units.to(tl.int64) * 8) + d * CHANNEL
    at = t[:, None]
    x0 = _input(rows, past[None, :], at - 3, d[None, :], in_tile, oldest, X_ROW, TOKEN)
    x1 = _input(rows, past[None, :], at - 2, d[None, :], in_tile, oldest, X_ROW, TOKEN)
    x2 = _input(rows, past[None, :], at - 1, d[None, :], in_tile, oldest, X_ROW, TOKEN)
    x3 = tl.load(rows + at.to(tl.int64) * X_ROW + d[None, :], mask=in_tile, other=0.0)
    w0 = tl.load(weight + d * 4, mask=in_d, other=0.0).to(tl.float32)[None, :]
    w1 = tl.load(weight + d * 4 + 1, mask=in_d, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weight + d * 4 + 2, mask=in_d, other=0.0).to(tl.float32)[None, :]
    w3 = tl.load(weight + d * 4 + 3, mask=in_d, other=0.0).to(tl.float32)[None, :]
    y = convolve(x0, x1, x2, x3, w0, w1, w2, w3).to(q.dtype.element_ty)

    row = (first + t).to(tl.int64)
    if head < 2 * HK:
        u = y.to(tl.float32)
        u = u * (1.0 / tl.sqrt(tl.sum(u * u, 1) + EPSILON))[:, None]
        to = row[:, None] * (HK * K) + (head % HK) * K + i[None, :]
        if head < HK:
            tl.store(q + to, u.to(q.dtype.element_ty), mask=in_tile)
        else:
            tl.store(k + to, u.to(k.dtype.element_ty), mask=in_tile)
    else:
        value_head = head - 2 * HK
        tl.store(v + row[:, None] * (HV * V) + value_head * V + i[None, :], y, mask=in_tile)
        alpha = tl.load(a + (source + t) * A_ROW + value_head, mask=in_t, other=0.0)
        gate = tl.load(b + (source + t) * B_ROW + value_head, mask=in_t, other=0.0)
        rate = tl.load(a_log + value_head).to(tl.float32)
        bias = tl.load(dt_bias + value_head).to(tl.float32)
        g, w = gates(alpha.to(tl.float32), gate.to(tl.float32), rate, bias)
        tl.store(decay + row * HV + value_head, g, mask=in_t)
        tl.store(beta + row * HV + value_head, w, mask=in_t)

    # Only the tile that a sequence begins with reads its history, so that one renews it.
    if begin == 0:
        j = tl.arange(0, 4)[:, None]
        three = (j < 3) & in_d[None, :]
        last = _input(rows, past[None, :], tokens - 3 + j, d[None, :], three, oldest, X_ROW, TOKEN)
        tl.debug_barrier()
        tl.store(past[None, :] + j * TOKEN, last, mask=three)
