"""Gated delta rule, one token at a time, with the causal convolution before it.

For each value head with key head h' (value heads share key heads in order), state S [K, V] fp32:

    x_t  = silu(conv(x)_t) rounded to the activation dtype, split into q, k, v
    q, k = l2norm(q) * K**-0.5, l2norm(k)                       l2norm(u) = u / sqrt(sum(u*u) + eps)
    g    = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
    S    = g * S
    S    = S + k (outer) (beta * (v - k.S))
    o    = q.S
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

EPSILON = 1e-6


def causal_conv(
    x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Depthwise causal convolution and silu of one sequence.

    Args:
        x: [T, D] inputs.
        history: [W - 1, D], the inputs before them (zeros before the sequence's start).
        weight: [D, W].
        bias: [D] or None.

    Returns:
        [T, D] in the dtype of ``x``.
    """
    width = weight.shape[1]
    inputs = torch.cat([history, x]).float()
    out = torch.zeros(x.shape, dtype=torch.float32)
    for j in range(width):
        out = out + inputs[j : j + x.shape[0]] * weight[:, j].float()
    if bias is not None:
        out = out + bias.float()
    return (out * torch.sigmoid(out)).to(x.dtype)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of one sequence.

    Args:
        q: [T, HK, K] queries.
        k: [T, HK, K] keys.
        v: [T, HV, V] values; HV is a multiple of HK.
        a: [T, HV] decay inputs.
        b: [T, HV] gate inputs.
        a_log: [HV].
        dt_bias: [HV].
        state: [HV, K, V] fp32, the state before the first token.

    Returns:
        Outputs [T, HV, V] in the dtype of ``v``, and the states after each token
        [T, HV, K, V] fp32.
    """
    tokens, heads = v.shape[0], v.shape[1]
    repeat = heads // k.shape[1]
    outputs, states = [], []
    for t in range(tokens):
        query = q[t].float().repeat_interleave(repeat, 0)
        key = k[t].float().repeat_interleave(repeat, 0)
        query = query / torch.sqrt((query * query).sum(-1, keepdim=True) + EPSILON)
        query = query * q.shape[-1] ** -0.5
        key = key / torch.sqrt((key * key).sum(-1, keepdim=True) + EPSILON)
        decay = torch.exp(-torch.exp(a_log.float()) * F.softplus(a[t].float() + dt_bias.float()))
        beta = torch.sigmoid(b[t].float())
        state = state * decay[:, None, None]
        read = (state * key[:, :, None]).sum(1)
        state = state + key[:, :, None] * (beta[:, None] * (v[t].float() - read))[:, None, :]
        outputs.append((state * query[:, :, None]).sum(1))
        states.append(state)
    return torch.stack(outputs).to(v.dtype), torch.stack(states)
