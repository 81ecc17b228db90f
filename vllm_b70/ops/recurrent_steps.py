"""Rows past their prompt on a GPU: the convolution, then the gated delta rule, token by token."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_b70.ops import gdn_launches, tiles
from vllm_b70.ops.gdn_launches import Launch
from vllm_b70.ops.launcher import Launcher

#: Channels of a program of the convolution, and its warps; free, they cannot change a result.
CONV_BLOCK, CONV_WARPS = 256, 4


@functools.cache
def _convolution(
    kernel: Any, channels: int, row: int, history: tuple[int, ...], overlap: bool
) -> Launcher:
    """``causal_conv1d.steps`` with its constants.

    Args:
        kernel: The kernel.
        channels: D.
        row: Values between two rows of x.
        history: The strides of the histories.
        overlap: As in ``Launch``.
    """
    return Launcher(
        kernel,
        dict(
            D=channels,
            X_ROW=row,
            TOKEN=history[1],
            CHANNEL=history[2],
            BD=CONV_BLOCK,
            PDL=overlap,
            num_warps=CONV_WARPS,
            enable_fp_fusion=False,
            **_options(overlap),
        ),
    )


def layout_constants(
    rows: tuple[int, int, int], key_heads: int, state: torch.Size
) -> dict[str, Any]:
    """What the kernels that read gates are compiled for: values between two rows of x, of a and of
    b; HK; the shape of the states but for their number."""
    heads, values, keys = state
    return dict(
        X_ROW=rows[0], A_ROW=rows[1], B_ROW=rows[2], HK=key_heads, HV=heads, K=keys, V=values
    )


@functools.cache
def _recurrence(
    kernel: Any,
    launch: Launch,
    rows: tuple[int, int, int],
    key_heads: int,
    state: torch.Size,
    device: torch.device,
) -> Launcher:
    """``gated_delta_rule.advance`` with its constants.

    Args:
        kernel: The kernel.
        launch: How it is launched.
        rows: Values between two rows of x, of a and of b.
        key_heads: HK.
        state: The shape of the states but for their number.
        device: Where it runs.
    """
    _, values, keys = state
    return Launcher(
        kernel,
        dict(
            **layout_constants(rows, key_heads, state),
            BV=min(launch.block, values),
            SCALE=keys**-0.5,
            PDL=launch.overlap,
            num_warps=launch.warps,
            enable_fp_fusion=False,
            **_options(launch.overlap),
            **tiles.grf_options(launch.grf, device),
        ),
    )


def _options(overlap: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if overlap else {}


def recurrent_steps(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    history: torch.Tensor,
    state: torch.Tensor,
    starts: torch.Tensor,
    read: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    key_heads: int,
    launch: Launch | None = None,
) -> None:
    """Advance every request whose ``read`` is not 0 by its rows.

    Args:
        x: [T, D] bf16 or fp16, D = 2 * key_heads * K + HV * V; rows may be strided.
        a: [T, HV] decay inputs; rows may be strided.
        b: [T, HV] write-gate inputs; rows may be strided.
        weight: [D, 4], the convolution's.
        a_log: [HV].
        dt_bias: [HV].
        history: [slots, at least 3, D], the dtype of x, any strides; updated.
        state: [slots, HV, V, K] fp32, contiguous but for the slots; updated.
        starts: [R + 1] int32, where each request's rows start.
        read: [R] int32, the slot of the state before a request's first row; 0: leave the request
            alone; negative: the state is lost, fill its rows of ``out`` with NaN.
        table: [R, C] int32, slots for the states after each request's last C rows; 0: none.
        out: [T, HV, V] contiguous, the dtype of x; rows of no advanced request stay as they are.
        key_heads: HK.
        launch: Instead of the device family's.

    Raises:
        ValueError: A shape, dtype or layout does not fit.
    """
    from vllm_b70.kernels import causal_conv1d, gated_delta_rule

    heads, values, keys = state.shape[1:]
    requests, columns = table.shape
    check_layout(x, a, b, weight, history, state, key_heads)
    if starts.shape != (requests + 1,) or read.shape != (requests,) or not table.is_contiguous():
        raise ValueError(
            f"starts {(*starts.shape,)}, read {(*read.shape,)} and table {(*table.shape,)} "
            "do not fit"
        )
    if out.shape != (x.shape[0], heads, values) or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous {(x.shape[0], heads, values)}")
    if requests == 0 or x.shape[0] == 0:
        return
    launch = launch or gdn_launches.recurrent(tiles.family(x.device), heads)
    block = min(launch.block, values)
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    channels, strides = x.shape[1], history.stride()
    _convolution(causal_conv1d.steps, channels, x.stride(0), strides, launch.overlap)(
        (requests, -(-channels // CONV_BLOCK)),
        (x, weight, history, starts, read, table, convolved),
        strides[0] // 8, columns,
    )  # fmt: skip
    launcher = _recurrence(
        gated_delta_rule.advance, launch, (channels, a.stride(0), b.stride(0)), key_heads,
        state.shape[1:], x.device,
    )  # fmt: skip
    launcher(
        (values // block, heads, requests),
        (convolved, a, b, a_log, dt_bias, state, starts, read, table, out),
        state.stride(0) // 4, columns,
    )  # fmt: skip


def check_layout(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    history: torch.Tensor,
    state: torch.Tensor,
    key_heads: int,
) -> None:
    """What both kinds of rows ask of their inputs.

    Raises:
        ValueError: A shape, dtype or layout does not fit.
    """
    _check_model(
        x.dtype, x.shape[1:], x.stride(1), weight.shape, weight.is_contiguous(), history.dtype,
        history.shape[1:], history.stride(0), state.dtype, state.shape[1:], state.stride(),
        key_heads,
    )  # fmt: skip
    for name, cache in (("history", history), ("state", state)):
        if cache.data_ptr() % 16:
            raise ValueError(_OFF.format(name))
    shape = (x.shape[0], state.shape[1])
    for name, gate in (("a", a), ("b", b)):
        if gate.shape != shape or gate.stride(1) != 1:
            raise ValueError(f"{name} must be {shape}, not {(*gate.shape,)}")


_OFF = "the {} of a slot must start at a multiple of 16 bytes"


# Once for a model's layers: this costs as much as a launch.
@functools.cache
def _check_model(
    dtype: torch.dtype,
    x: torch.Size,
    x_stride: int,
    weight: torch.Size,
    weight_contiguous: bool,
    history_dtype: torch.dtype,
    history: torch.Size,
    history_stride: int,
    state_dtype: torch.dtype,
    state: torch.Size,
    state_strides: tuple[int, ...],
    key_heads: int,
) -> None:
    """What ``check_layout`` asks that no step changes.

    Args:
        dtype: Of x.
        x, history, state: Shapes but for the first dimension.
        x_stride: Of the channels.
        weight: Its shape.
        weight_contiguous: Whether it is.
        history_dtype, state_dtype: Theirs.
        history_stride: Values between slots.
        state_strides: All of the states'.
        key_heads: HK.

    Raises:
        ValueError: A shape, dtype or layout does not fit.
    """
    heads, values, keys = state
    channels = 2 * key_heads * keys + heads * values
    if state_dtype != torch.float32:
        raise ValueError(f"the recurrent state must be float32, not {state_dtype}")
    if state_strides[1:] != (values * keys, keys, 1) or heads % key_heads:
        raise ValueError(f"state {(*state,)} must be contiguous but for its slots")
    for name, size in (
        ("history", history_stride * history_dtype.itemsize),
        ("state", state_strides[0] * state_dtype.itemsize),
    ):
        if size % 16:
            raise ValueError(_OFF.format(name))
    for name, size in (("keys", keys), ("values", values)):
        if size & (size - 1):
            raise ValueError(f"a head's {name} must be a power of two, not {size}")
    if dtype not in (torch.bfloat16, torch.float16) or history_dtype != dtype:
        raise ValueError(f"x {dtype} and history {history_dtype} must be one 16-bit dtype")
    if x != (channels,) or x_stride != 1:
        raise ValueError(f"x must be [T, {channels}], not [T, {(*x,)}]")
    if weight != (channels, 4) or not weight_contiguous:
        raise ValueError(f"weight must be a contiguous [{channels}, 4], not {(*weight,)}")
    if len(history) != 2 or history[0] < 3 or history[1] != channels:
        raise ValueError(f"history must be [slots, 3, {channels}], not [slots, {(*history,)}]")
