"""The gated delta rule over a state cache: convolution, gates and recurrence on torch tensors.

These are plain functions: the op that torch.compile sees is the whole layer core
(``layers.gated_delta_net``), because it reads the step's metadata.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_b70.ops import library


def causal_conv(
    x: torch.Tensor,
    history: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    starts: np.ndarray,
) -> torch.Tensor:
    """Depthwise causal convolution and silu of several sequences.

    Args:
        x: [T, D] bf16 or fp16.
        history: [S, W - 1, D], the inputs before each sequence's first token.
        weight: [D, W] fp32.
        bias: [D] fp32 or None.
        starts: [S + 1] int64, where each sequence starts in ``x``.

    Returns:
        [T, D] in the dtype of ``x``.
    """
    library.start_numba()
    from vllm_b70.cpu import gated_delta_rule as cpu

    out = torch.empty(x.shape, dtype=torch.float32)
    cpu.causal_conv(
        x.float().contiguous().numpy(),
        history.float().contiguous().numpy(),
        weight.numpy(),
        np.zeros(0, np.float32) if bias is None else bias.numpy(),
        starts,
        out.numpy(),
    )
    return out.to(x.dtype)


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithm of the decay, and the write gate.

    Args:
        a: [T, H].
        b: [T, H].
        a_log: [H] fp32.
        dt_bias: [H] fp32.

    Returns:
        Two tensors [T, H] fp32.
    """
    library.start_numba()
    from vllm_b70.cpu import gated_delta_rule as cpu

    decay, beta = torch.empty(2, *a.shape, dtype=torch.float32)
    cpu.gates(
        a.float().contiguous().numpy(),
        b.float().contiguous().numpy(),
        a_log.numpy(),
        dt_bias.numpy(),
        decay.numpy(),
        beta.numpy(),
    )
    return decay, beta


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    starts: np.ndarray,
    read: np.ndarray,
    write: np.ndarray,
) -> torch.Tensor:
    """The recurrence of several sequences, one token at a time.

    Args:
        q: [T, HK, K] bf16 or fp16, before normalisation.
        k: [T, HK, K], before normalisation.
        v: [T, HV, V].
        decay: [T, HV] fp32.
        beta: [T, HV] fp32.
        state: [slots, HV, K, V] fp32, updated in place.
        starts: [S + 1] int64.
        read: [S] int64 slot of each sequence's state before its first token.
        write: [T] int64 slot for the state after each token, or -1.

    Returns:
        [T, HV, V] in the dtype of ``v``.
    """
    library.start_numba()
    from vllm_b70.cpu import gated_delta_rule as cpu

    if state.dtype != torch.float32:
        raise ValueError(f"the recurrent state must be float32, not {state.dtype}")
    out = torch.empty(v.shape, dtype=torch.float32)
    cpu.gated_delta_rule(
        q.float().contiguous().numpy(),
        k.float().contiguous().numpy(),
        v.float().contiguous().numpy(),
        decay.numpy(),
        beta.numpy(),
        state.numpy(),
        starts,
        read,
        write,
        out.numpy(),
    )
    return out.to(v.dtype)
