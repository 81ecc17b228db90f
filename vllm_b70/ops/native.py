"""``torch.ops.vllm_b70.native_linear`` and ``native_int4_linear``: the vendor's GEMMs, called with
the row counts of one class only.

The class is found and certified by ``row_classes``; here a call becomes calls of its members.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from vllm_b70.ops import library, row_classes
from vllm_b70.ops.checks import check_bias, check_rows
from vllm_b70.ops.row_classes import Gemm

#: Where operands begin. A vendor may choose a kernel by the alignment of a pointer, so all calls
#: have that of torch's own allocations.
ALIGNMENT = {"cpu": 64}
ALIGNMENT_GPU = 256
DEVICES = ("CPU", "CUDA", "XPU")

#: What calls are padded in, one for each device, dtype and K: calls follow one another on a stream.
_pads: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}


def alignment(device: torch.device) -> int:
    """Bytes of which an operand's address has to be a multiple."""
    return ALIGNMENT.get(device.type, ALIGNMENT_GPU)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins where the vendor's operands have to."""
    return tensor.data_ptr() % alignment(tensor.device) == 0


def reserve(device: torch.device, dtype: torch.dtype, depth: int, rows: int) -> None:
    """Have a buffer for padded calls of at most so many rows of ``depth`` values.

    To be called before graphs are captured: they know the address.

    Args:
        device: Of the calls.
        dtype: Of the rows.
        depth: K.
        rows: The largest member of the class.
    """
    key = (device, dtype, depth)
    there = _pads.get(key)
    if there is None or len(there) < rows:
        with torch.inference_mode(False):  # it is written to in either mode
            _pads[key] = torch.zeros(rows, depth, dtype=dtype, device=device)


def _padded(x: torch.Tensor, called: int) -> torch.Tensor:
    """The rows at the begin of the buffer; what an earlier call left after them may stay."""
    pad = _pads.get((x.device, x.dtype, x.shape[1]))
    if pad is None or len(pad) < called:
        raise RuntimeError(
            f"no buffer of {called} rows of {x.shape[1]} values was reserved before this call"
        )
    pad[: len(x)].copy_(x)
    return pad[:called]


@functools.cache
def _cuts(spans: tuple[int, ...], rows: int) -> tuple[tuple[int, int], ...]:
    return row_classes.pieces(row_classes.members_of(spans), rows)


def in_class(x: torch.Tensor, columns: int, spans: Sequence[int], gemm: Gemm) -> torch.Tensor:
    """``gemm`` over rows, called with members of a class only.

    Args:
        x: [M, K], contiguous.
        columns: N.
        spans: The certified class, from ``row_classes.spans``.
        gemm: The vendor's.

    Returns:
        [M, N].
    """
    cuts = _cuts(tuple(spans), x.shape[0])

    def call(part: torch.Tensor, called: int) -> torch.Tensor:
        if len(part) == called and is_aligned(part):
            return gemm(part)
        return gemm(_padded(part, called))[: len(part)]

    if len(cuts) == 1:
        return call(x, cuts[0][1])
    out = x.new_empty((x.shape[0], columns))
    first = 0
    for rows, called in cuts:
        out[first : first + rows].copy_(call(x[first : first + rows], called))
        first += rows
    return out


def linear_gemm(weight: torch.Tensor) -> Gemm:
    """The vendor's 16-bit GEMM: cuBLAS, oneDNN or MKL, as torch picks.

    Args:
        weight: [N, K], contiguous.
    """
    return lambda x: torch.nn.functional.linear(x, weight)


def int4_gemm(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int) -> Gemm:
    """Intel's W4A16 GEMM (oneDNN, in vllm-xpu-kernels).

    Args:
        weight: [N, K / 8] int32, 8 values of k in a word, the lowest first.
        scale: [K / group, N], the rows' dtype.
        zero: [K / group, N / 8] int32, 8 columns in a word, or [1] int8 for all.
        group: Values of k that share a scale.
    """
    call = torch.ops._xpu_C.int4_gemm_w4a16
    # The last argument is what is left of act-order checkpoints.
    return lambda x: call(x, weight.t(), None, scale, zero, group, None)


def has_int4_gemm() -> bool:
    """Whether ``int4_gemm`` is there; vLLM's XPU platform imports the module that has it."""
    return hasattr(torch.ops, "_xpu_C") and hasattr(torch.ops._xpu_C, "int4_gemm_w4a16")


def _finish(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """With the bias, in an addition of its own: with one the vendor might choose another kernel."""
    return y if bias is None else y.add_(bias)


def native_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spans: list[int]
) -> torch.Tensor:
    """16-bit linear by the vendor's GEMM, whose row m depends on row m of ``x``, the weight and the
    class alone.

    Args:
        x: [M, K] bf16 or fp16.
        weight: [N, K], the dtype of ``x``.
        bias: [N] or None.
        spans: The certified class, from ``row_classes.spans``.

    Returns:
        [M, N] in the dtype of ``x``: the vendor's result, rounded, then the bias.

    Raises:
        ValueError: A shape or dtype does not fit.
        RuntimeError: ``reserve`` was not called.
    """
    check_rows(x)
    if weight.dtype != x.dtype or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"weight must be {x.dtype} [N, {x.shape[1]}], not {weight.dtype} {(*weight.shape,)}"
        )
    check_bias(bias, weight.shape[0])
    return _finish(in_class(x.contiguous(), weight.shape[0], spans, linear_gemm(weight)), bias)


def native_int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
    spans: list[int],
) -> torch.Tensor:
    """W4A16 linear by the vendor's GEMM; as ``native_linear``.

    Args:
        x: [M, K] bf16 or fp16.
        weight, scale, zero, group: As in ``int4_gemm``.
        bias: [N] or None.
        spans: The certified class, from ``row_classes.spans``.
    """
    check_rows(x)
    columns = weight.shape[0]
    if weight.dtype != torch.int32 or weight.shape[1] * 8 != x.shape[1]:
        raise ValueError(
            f"weight must be int32 [N, {x.shape[1] // 8}], not {weight.dtype} {(*weight.shape,)}"
        )
    if scale.dtype != x.dtype or scale.shape != (x.shape[1] // group, columns):
        raise ValueError(
            f"scale must be {x.dtype} {(x.shape[1] // group, columns)}, not {scale.dtype} "
            f"{(*scale.shape,)}"
        )
    check_bias(bias, columns)
    gemm = int4_gemm(weight, scale, zero, group)
    return _finish(in_class(x.contiguous(), columns, spans, gemm), bias)


def _fake_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spans: list[int]
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _fake_int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
    spans: list[int],
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


library.define(
    "native_linear(Tensor x, Tensor weight, Tensor? bias, int[] spans) -> Tensor",
    native_linear,
    _fake_linear,
    DEVICES,
)
library.define(
    "native_int4_linear(Tensor x, Tensor weight, Tensor scale, Tensor zero, Tensor? bias, "
    "int group, int[] spans) -> Tensor",
    native_int4_linear,
    _fake_int4_linear,
    DEVICES,
)
