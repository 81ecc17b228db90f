"""``torch.ops.vllm_b70.int4_linear``: the W4A16 linear layer."""

from __future__ import annotations

import numpy as np
import torch

from vllm_b70.ops import library
from vllm_b70.ops.checks import check_bias, check_rows


def pack_int4(q: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit values for the op.

    Args:
        q: [K, N] integers 0..15.

    Returns:
        [ceil(K / 2), N] uint8; row i holds k = 2i in the low nibble and 2i + 1 in the high one.
    """
    q = q.to(torch.uint8)
    if q.shape[0] % 2:
        q = torch.cat([q, torch.zeros_like(q[:1])])
    return (q[0::2] | (q[1::2] << 4)).contiguous()


def unpack_int4(weight: torch.Tensor, depth: int) -> torch.Tensor:
    """Inverse of ``pack_int4``: [K, N] uint8 for K = ``depth``."""
    return torch.stack((weight & 15, weight >> 4), 1).flatten(0, 1)[:depth]


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> tuple[int, int]:
    depth, columns = x.shape[-1], weight.shape[-1]
    check_rows(x)
    if weight.dtype != torch.uint8 or weight.shape[0] != (depth + 1) // 2:
        raise ValueError(
            f"weight must be uint8 [{(depth + 1) // 2}, N] for K={depth}, "
            f"not {weight.dtype} {(*weight.shape,)}"
        )
    if group_size < 1 or depth % group_size:
        raise ValueError(f"group size {group_size} does not divide K={depth}")
    groups = (depth // group_size, columns)
    if scale.dtype != torch.float32 or scale.shape != groups:
        raise ValueError(f"scale must be float32 {groups}, not {scale.dtype} {(*scale.shape,)}")
    if zero is not None and (zero.dtype != torch.uint8 or zero.shape != groups):
        raise ValueError(f"zero must be uint8 {groups}, not {zero.dtype} {(*zero.shape,)}")
    check_bias(bias, columns)
    return x.shape[0], columns


def int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """W4A16 linear whose row m depends on row m of ``x`` and the weights alone.

    Args:
        x: [M, K] bf16 or fp16.
        weight: [ceil(K / 2), N] uint8 from ``pack_int4``.
        scale: [K / group_size, N] fp32.
        zero: [K / group_size, N] uint8, or None for the symmetric 8.
        bias: [N] or None.
        group_size: Values of k that share a scale.

    Returns:
        [M, N] in the dtype of ``x``; the arithmetic is in ``reference.int4_linear``.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    rows, columns = _check(x, weight, scale, zero, bias, group_size)
    library.start_numba()
    from vllm_b70.cpu.gemm import int4_gemm

    out = torch.empty((rows, columns), dtype=torch.float32)
    int4_gemm(
        x.float().contiguous().numpy(),
        weight.numpy(),
        scale.numpy(),
        np.zeros((0, 0), np.uint8) if zero is None else zero.numpy(),
        np.zeros(0, np.float32) if bias is None else bias.float().numpy(),
        group_size,
        out.numpy(),
    )
    return out.to(x.dtype)


def int4_linear_naive(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """The control: dequantise to fp32 and call BLAS, whose order of addition follows the row count.

    Same arguments and result shape as ``int4_linear``. It exists to be caught by the harness.
    """
    rows, columns = _check(x, weight, scale, zero, bias, group_size)
    depth = x.shape[1]
    zeros = 8.0 if zero is None else zero.float().repeat_interleave(group_size, 0)
    dense = (unpack_int4(weight, depth).float() - zeros) * scale.repeat_interleave(group_size, 0)
    y = x.float() @ dense
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias, int group_size) -> Tensor"
)
library.define("int4_linear" + _SCHEMA, int4_linear, _fake)
library.define("int4_linear_naive" + _SCHEMA, int4_linear_naive, _fake)
