"""The norms: ``torch.ops.vllm_b70.rms_norm``, ``add_rms_norm``, ``gated_rms_norm``, ``l2_norm``.

On a GPU all are one kernel. The CPU has an op of its own for the gated norm alone: vLLM's other
norms are row-invariant there.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from vllm_b70.ops import library, tiles
from vllm_b70.ops.launcher import Launcher

#: Values that a program of an XPU holds when there are rows enough to fill the device, and that a
#: warp does; a thread of an XPU has fewer registers.
PROGRAM, WARP, XPU_WARP = 4096, 1024, 512
#: Rows below which a program takes one row only, so that few rows spread over the device; values
#: below which it has one warp (not on an XPU, where nothing was timed).
FEW, MANY = 512, 2**22


@functools.cache
def _launcher(
    kernel: Any,
    columns: int,
    heads: int,
    rows_a_program: int,
    warps: int,
    mean: bool,
    weight: bool,
    residual: bool,
    gate: str,
    overlap: bool,
    device: torch.device,
) -> Launcher:
    """The kernel with its constants."""
    size, rest = pieces(columns)
    return Launcher(
        kernel,
        dict(
            COLUMNS=columns,
            SIZE=size,
            LEVELS=size.bit_length() - 1,
            REST=rest,
            # Where the warps of a program that has one row meet, each has one value left.
            LAST=warps if rows_a_program == 1 and device.type != "xpu" else 1,
            ROWS=rows_a_program,
            HEADS=heads,
            MEAN=mean,
            WEIGHT=weight,
            RESIDUAL=residual,
            GATE=gate,
            num_warps=warps,
            enable_fp_fusion=False,
            **tiles.overlap_options(device, overlap),
        ),
    )


def launch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    *,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    gate: str = "none",
    mean: bool = True,
    rows_a_program: int | None = None,
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate, choose the launch and run the kernel; what every norm on a GPU is.

    Args:
        x: [..., D] fp16, bf16 or fp32.
        weight: [D] of any floating dtype, or None.
        epsilon: Added to the mean square (to the sum of squares if not ``mean``).
        offset: Added to the weight in fp32.
        residual: As ``x`` or None; added first.
        z: As ``x`` or None: the gate's input.
        gate: ``none``, ``silu`` or ``sigmoid``.
        mean: Divide the sum of squares by D.
        rows_a_program, warps: The launch; cannot change a result. None chooses by the row count.

    Returns:
        The norm, contiguous, and the rounded sum of ``x`` and ``residual`` if there is one.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    columns = x.shape[-1]
    for name, other in (("residual", residual), ("z", z)):
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
            raise ValueError(
                f"{name} must be {x.dtype} {(*x.shape,)}, not {other.dtype} {(*other.shape,)}"
            )
    if weight is not None and weight.shape != (columns,):
        raise ValueError(f"weight must be [{columns}], not {(*weight.shape,)}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"x must be bfloat16, float16 or float32, not {x.dtype}")
    from vllm_b70.kernels import norm as kernels

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if residual is not None else None
    heads = x.shape[-2] if x.dim() > 2 else 1
    x = _rows(x, heads)
    residual, z = (None if t is None else _rows(t, heads) for t in (residual, z))
    rows = x.shape[0] * heads
    if rows == 0 or columns == 0:
        return out, total
    size = 1 << (columns - 1).bit_length()
    rows_a_program, warps = choose(rows, size, x.device.type, rows_a_program, warps)
    launcher = _launcher(
        kernels.rms_norm, columns, heads, rows_a_program, warps, mean, weight is not None,
        residual is not None, gate, rows * size < MANY, x.device,
    )  # fmt: skip
    launcher(
        (-(-rows // rows_a_program),),
        (
            x,
            x if residual is None else residual,
            x if z is None else z,
            x if weight is None else weight.contiguous(),
            out,
            out if total is None else total,
        ),
        rows,
        epsilon,
        offset,
        *(_strides(x) + _strides(residual) + _strides(z)),
    )
    return out, total


def pieces(columns: int) -> tuple[int, int]:
    """SIZE and REST of the kernel for a row of so many values."""
    size = 1 << (columns - 1).bit_length()
    rest = columns - size // 2
    # Shorter ones would not be whole in the registers of four warps.
    if rest < size // 2 and rest >= 1024 and rest & (rest - 1) == 0:
        return size // 2, rest
    return size, 0


def choose(
    rows: int,
    size: int,
    device_type: str,
    rows_a_program: int | None = None,
    warps: int | None = None,
) -> tuple[int, int]:
    """Rows and warps of a program where they are not given; neither can change a result.

    Args:
        rows: All rows.
        size: Values of a row, a power of two.
        device_type: Of the tensors.
        rows_a_program, warps: What is given.
    """
    if rows_a_program is None:
        values = PROGRAM
        if device_type != "xpu":
            values = WARP // 2 if rows * size < MANY else WARP
        rows_a_program = 1 if rows < FEW else max(1, values // size)
    if warps is None:
        if device_type == "xpu":
            a_warp, most = XPU_WARP, 16
        else:
            # Beyond four warps the barriers of a row cost more than its loads gain: 8 warps took
            # 1.4 times as long as 4 for rows of 4,096 and of 5,120 on an H200.
            a_warp, most = WARP, 4 if size <= 8192 else 16
            if rows_a_program > 1 and rows * size >= MANY:
                # Short rows by the thousand: 1,024 values and four warps a program reached 0.95 of
                # the bandwidth for 131,072 rows of 128 on an H200, 4,096 values 0.89.
                a_warp = WARP // 4
        warps = max(1, min(most, rows_a_program * size // a_warp))
    return rows_a_program, warps


def _rows(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[T, D], or [T, heads, D], with a contiguous last dimension; a copy only where no view is one,
    and no view either where ``x`` is so itself."""
    if x.dim() not in (2, 3):
        x = x.reshape(-1, heads, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: torch.Tensor | None) -> tuple[int, int]:
    """Values between two T, and between two heads; the latter is of no use if there is one."""
    if x is None:
        return 0, 0
    strides = x.stride()
    return strides[0], strides[-2]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, offset: float
) -> torch.Tensor:
    """RMS norm whose row depends on that row alone; the arithmetic is in ``reference.norm``.

    Args:
        x: [..., D] fp16, bf16 or fp32.
        weight: [D] or None.
        epsilon: Added to the mean square.
        offset: Added to the weight in fp32: 1 for Gemma's norm.

    Returns:
        As ``x``, contiguous.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    return launch(x, weight, epsilon, offset=offset)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm`` of the rounded sum of two tensors.

    Args:
        x: [..., D] fp16, bf16 or fp32.
        residual: As ``x``.
        weight, epsilon, offset: As in ``rms_norm``.

    Returns:
        The norm and the sum, as ``x``, contiguous.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    out, total = launch(x, weight, epsilon, offset=offset, residual=residual)
    assert total is not None
    return out, total


def l2_norm(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x * rsqrt(sum(x * x) + epsilon) over the last dimension; row by row.

    Args:
        x: [..., D] fp16, bf16 or fp32.
        epsilon: Added to the sum of squares.

    Returns:
        As ``x``, contiguous.
    """
    return launch(x, None, epsilon, mean=False)[0]


def gated_rms_norm_gpu(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, epsilon: float, sigmoid_only: bool
) -> torch.Tensor:
    """``gated_rms_norm`` on a GPU: the tree of ``rms_norm``; the same arguments and errors."""
    return launch(x, weight, epsilon, z=z, gate="sigmoid" if sigmoid_only else "silu")[0]


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, epsilon: float, sigmoid_only: bool
) -> torch.Tensor:
    """Gated RMS norm whose row depends on that row alone, on the CPU.

    Args:
        x: [..., D] bf16 or fp16.
        z: the shape and dtype of ``x``.
        weight: [D].
        epsilon: Added to the mean square.
        sigmoid_only: The gate is sigmoid(z), else silu(z).

    Returns:
        As ``x``; the arithmetic is in ``reference.norm``.

    Raises:
        ValueError: The shapes differ.
    """
    if x.shape != z.shape or weight.shape != x.shape[-1:]:
        raise ValueError(f"x {(*x.shape,)}, z {(*z.shape,)}, weight {(*weight.shape,)} do not fit")
    library.start_numba()
    from vllm_b70.cpu.norm import gated_rms_norm as run

    rows = (-1, x.shape[-1])
    out = torch.empty(x.reshape(rows).shape, dtype=torch.float32)
    run(
        x.reshape(rows).float().contiguous().numpy(),
        z.reshape(rows).float().contiguous().numpy(),
        weight.float().numpy(),
        np.float32(epsilon),
        sigmoid_only,
        out.numpy(),
    )
    return out.to(x.dtype).view(x.shape)


def _like(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _twice_like(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(x), _like(x)


#: The CPU key is the interpreter's, for tests; nothing on the CPU route calls these.
EVERYWHERE = ("CUDA", "XPU", "CPU")
library.define(
    "rms_norm(Tensor x, Tensor? weight, float epsilon, float offset) -> Tensor",
    rms_norm,
    _like,
    EVERYWHERE,
)
library.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float epsilon, float offset) "
    "-> (Tensor, Tensor)",
    add_rms_norm,
    _twice_like,
    EVERYWHERE,
)
library.define("l2_norm(Tensor x, float epsilon) -> Tensor", l2_norm, _like, EVERYWHERE)
library.define(
    "gated_rms_norm(Tensor x, Tensor z, Tensor weight, float epsilon, bool sigmoid_only) -> Tensor",
    gated_rms_norm,
    _like,
)
library.implement("gated_rms_norm", gated_rms_norm_gpu, ("CUDA", "XPU"))
