"""The gated delta rule of rows past their prompt, token by token; see reference.gated_delta_rule.

One program computes BV rows of one value head's state for one request. Its loop over the request's
tokens is the whole of the arithmetic, so a token gets the same bits in a step of one token, in the
verification of k drafts and in a replay. Launches switch fusion off. BV and the warps choose in
which order the K products of a sum are added: they belong to the device family, never to the batch.
The draft depth, and the slots' distance that follows from it, are no constants either, so that a
server with another depth runs the same binary.
"""

import triton
import triton.language as tl

from vllm_b70.kernels.overlap import let_next_start, wait

EPSILON = tl.constexpr(1e-6)
SOFTPLUS_THRESHOLD = tl.constexpr(20.0)


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Logarithm of the decay, and the write gate; all fp32."""
    u = a + dt_bias
    softplus = tl.where(u <= SOFTPLUS_THRESHOLD, tl.log(1.0 + tl.exp(u)), u)
    return -tl.exp(a_log) * softplus, tl.sigmoid(b)


@triton.jit(
    do_not_specialize=["slot_units", "columns"],
    do_not_specialize_on_alignment=["a", "b", "a_log", "dt_bias", "starts", "read", "table"],
)
def advance(
    x,
    a,
    b,
    a_log,
    dt_bias,
    state,
    starts,
    read,
    table,
    out,
    slot_units,
    columns,
    X_ROW: tl.constexpr,
    A_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (V / BV, HV, requests).

    Args:
        x: [T, 2 * HK * K + HV * V], rows X_ROW apart: convolved q, k and v, 16 bit.
        a, b: [T, HV], rows A_ROW and B_ROW apart: inputs of the gates.
        a_log, dt_bias: [HV].
        state: [slots, HV, V, K] fp32, slots 4 * slot_units apart; read and written.
        starts: [requests + 1] int32, where each request's rows start.
        read: [requests] int32, the slot of the state before a request's first row; 0 for a request
            that is not advanced, negative for one whose state is lost: its rows become NaN.
        table: [requests, columns] int32, where to leave the states after the last ``columns`` rows.
            Slot 0 is never written.
        out: [T, HV, V] contiguous, 16 bit; filled for the rows of advanced requests.
    """
    if PDL:
        wait()
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(read + request)
    if slot == 0:
        return
    first = tl.load(starts + request)
    tokens = tl.load(starts + request + 1) - first
    first = first.to(tl.int64)

    in_k = tl.arange(0, K)
    in_v = block * BV + tl.arange(0, BV)
    in_state = (head * V + in_v)[:, None] * K + in_k[None, :]
    # A product with 1 is exact; one with NaN marks all that follows from a lost state.
    distance = slot_units.to(tl.int64) * 4
    s = tl.load(state + tl.maximum(slot, 0) * distance + in_state)
    s = s * tl.where(slot > 0, 1.0, float("nan"))

    key_head = head // (HV // HK)
    q_at = x + first * X_ROW + key_head * K + in_k
    k_at = q_at + HK * K
    v_at = x + first * X_ROW + 2 * HK * K + head * V + in_v
    a_at = a + first * A_ROW + head
    b_at = b + first * B_ROW + head
    out_at = out + (first * HV + head) * V + in_v
    rate, bias = tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    # A token's inputs are loaded while the one before it is computed.
    q, k, v = tl.load(q_at), tl.load(k_at), tl.load(v_at)
    alpha, gate = tl.load(a_at), tl.load(b_at)
    if PDL:
        let_next_start()
    for t in range(tokens):
        ahead = tl.minimum(t + 1, tokens - 1)
        q_next, k_next = tl.load(q_at + ahead * X_ROW), tl.load(k_at + ahead * X_ROW)
        v_next = tl.load(v_at + ahead * X_ROW)
        alpha_next, gate_next = tl.load(a_at + ahead * A_ROW), tl.load(b_at + ahead * B_ROW)
        column = t - tokens + tl.minimum(tokens, columns)
        target = tl.load(table + request * columns + column, mask=column >= 0, other=0)

        query, key = q.to(tl.float32), k.to(tl.float32)
        query = query * (1.0 / tl.sqrt(tl.sum(query * query, 0) + EPSILON) * SCALE)
        key = key * (1.0 / tl.sqrt(tl.sum(key * key, 0) + EPSILON))
        decay, beta = gates(alpha.to(tl.float32), gate.to(tl.float32), rate, bias)
        s = s * tl.exp(decay)
        update = (v.to(tl.float32) - tl.sum(s * key[None, :], 1)) * beta
        s = s + update[:, None] * key[None, :]
        y = tl.sum(s * query[None, :], 1)
        tl.store(out_at + t * (HV * V), y.to(out.dtype.element_ty))
        if target > 0:
            tl.store(state + target * distance + in_state, s)
        q, k, v, alpha, gate = q_next, k_next, v_next, alpha_next, gate_next
