"""Prompt chunks on a GPU, up to the chunked kernel: convolution, norm of q and k, gates."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from vllm_b70.chunk_grid import GRID
from vllm_b70.ops import tiles
from vllm_b70.ops.launcher import Launcher
from vllm_b70.ops.recurrent_steps import check_layout, layout_constants

#: Tokens of a program, and its warps. They choose the order in which the norm adds, so they are
#: constants. An XPU's threads need the larger number of registers for them.
BLOCK_TOKENS, WARPS, GRF = 16, 4, 256


@dataclass
class PromptSequences:
    """Which rows are prompt chunks, one sequence a request.

    Attributes:
        sources: [N] int32, the row where each begins.
        starts: [N + 1] int32, where it begins among all prompt rows; the last is their number.
        slots: [N] int32 or int64, the slot it works in.
        resumed: [N] int32, 1, or 0 where the sequence begins here.
        chunks: [blocks, 2] int32, the sequence and the number of each block of 64 tokens.
    """

    sources: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    resumed: torch.Tensor
    chunks: torch.Tensor


@functools.cache
def _launcher(
    kernel: Any,
    rows: tuple[int, int, int],
    history: tuple[int, ...],
    key_heads: int,
    state: torch.Size,
    device: torch.device,
) -> Launcher:
    """The kernel with its constants.

    Args:
        kernel: ``causal_conv1d.prompts``.
        rows: Values between two rows of x, of a and of b.
        history: The strides of the histories.
        key_heads: HK.
        state: The shape of the states but for their number.
        device: Where it runs.
    """
    _, values, keys = state
    return Launcher(
        kernel,
        dict(
            **layout_constants(rows, key_heads, state),
            TOKEN=history[1],
            CHANNEL=history[2],
            BD=max(keys, values),
            GRID=GRID,
            BT=BLOCK_TOKENS,
            num_warps=WARPS,
            enable_fp_fusion=False,
            **tiles.grf_options(GRF, device),
        ),
    )


def prompt_inputs(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    history: torch.Tensor,
    state: torch.Tensor,
    sequences: PromptSequences,
    tokens: int,
    key_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the chunked kernel takes, and the history that the chunks leave.

    Args:
        x, a, b, weight, a_log, dt_bias, history, state, key_heads: As for ``recurrent_steps``;
            ``history`` is updated, of ``state`` only the shape counts.
        sequences: The chunks.
        tokens: Their rows together.

    Returns:
        Normalised q and k [tokens, HK, K] and v [tokens, HV, V] in the dtype of ``x``; the
        logarithm of the decay and the write gate, [tokens, HV] fp32.

    Raises:
        ValueError: A shape, dtype or layout does not fit.
    """
    from vllm_b70.kernels import causal_conv1d

    heads, values, keys = state.shape[1:]
    check_layout(x, a, b, weight, history, state, key_heads)
    q = torch.empty((tokens, key_heads, keys), dtype=x.dtype, device=x.device)
    k = torch.empty_like(q)
    v = torch.empty((tokens, heads, values), dtype=x.dtype, device=x.device)
    decay = torch.empty((tokens, heads), dtype=torch.float32, device=x.device)
    beta = torch.empty_like(decay)
    programs = len(sequences.chunks) * (GRID // BLOCK_TOKENS)
    launcher = _launcher(
        causal_conv1d.prompts, (x.stride(0), a.stride(0), b.stride(0)), history.stride(), key_heads,
        state.shape[1:], x.device,
    )  # fmt: skip
    launcher(
        (programs, 2 * key_heads + heads),
        (x, a, b, a_log, dt_bias, weight, history, sequences.sources, sequences.starts,
         sequences.slots, sequences.resumed, sequences.chunks, q, k, v, decay, beta),
        history.stride(0) // 8,
    )  # fmt: skip
    return q, k, v, decay, beta
