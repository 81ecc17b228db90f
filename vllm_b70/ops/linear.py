"""``torch.ops.vllm_b70.linear``: the 16-bit linear layer."""

from __future__ import annotations

import numpy as np
import torch

from vllm_b70.ops import library
from vllm_b70.ops.checks import check_bias, check_rows


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Transpose a weight for the op.

    Args:
        weight: [N, K] bf16 or fp16.

    Returns:
        [K, N], contiguous, a copy.
    """
    return weight.t().contiguous()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """16-bit linear whose row m depends on row m of ``x`` and the weights alone.

    Args:
        x: [M, K] bf16 or fp16.
        weight: [K, N] from ``pack``, the dtype of ``x``.
        bias: [N] or None.

    Returns:
        [M, N] in the dtype of ``x``; the arithmetic is in ``reference.linear``.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    library.start_numba()
    from vllm_b70.cpu.gemm import BFLOAT16, FLOAT16, gemm

    kinds = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
    check_rows(x)
    if weight.dtype != x.dtype or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(
            f"weight must be {x.dtype} [{x.shape[1]}, N], not {weight.dtype} {(*weight.shape,)}"
        )
    check_bias(bias, weight.shape[1])
    out = torch.empty((x.shape[0], weight.shape[1]), dtype=torch.float32)
    gemm(
        x.float().contiguous().numpy(),
        weight.view(torch.uint16).numpy(),
        kinds[x.dtype],
        np.zeros(0, np.float32) if bias is None else bias.float().numpy(),
        out.numpy(),
    )
    return out.to(x.dtype)


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", linear, _fake)
