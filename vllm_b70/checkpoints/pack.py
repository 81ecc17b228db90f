"""INT4 weight quantisation (round to nearest) and the two packed layouts that vLLM reads.

Notation: N output features, K input features, G group size along K, S = K / G groups.
A group size of -1 means one group per output channel (channelwise, S = 1).

A *code* is the stored unsigned nibble, 0..15. The real weight is ``(code - zero) * scale``;
``zero`` is 8 for symmetric weights. compressed-tensors describes the same nibble as a signed
value -8..7 that is stored with an offset of 8, which yields the same bits.

Layouts (nibble 0 is the lowest four bits of the int32):

* compressed-tensors ``pack-quantized``: ``weight_packed`` [N, ceil(K/8)] int32 along K,
  ``weight_scale`` [N, S], ``weight_shape`` [2] int64, and for asymmetric weights
  ``weight_zero_point`` [ceil(N/8), S] int32 along N. Unused nibbles are 0.
* GPTQ (v1): ``qweight`` [K/8, N] int32 along K, ``scales`` [S, N],
  ``qzeros`` [S, N/8] int32 along N, storing ``zero - 1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PACK_FACTOR = 8
"""Nibbles in one int32."""

SYMMETRIC_ZERO = 8
"""Zero point of every symmetric group."""

_CODE_MAX = 15
_GPTQ_V1_OFFSET = 1


@dataclass(frozen=True)
class QuantizedWeight:
    """One INT4 weight matrix, unpacked.

    Attributes:
        codes: uint8 [N, K], values 0..15.
        scales: float [N, S].
        zero_points: uint8 [N, S], values 0..15, or None for symmetric weights.
    """

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None = None

    @property
    def group_size(self) -> int:
        """Number of input features that share a scale (K when channelwise)."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [N, K] in ``dtype``, computed in float32."""
        n, k = self.codes.shape
        grouped = self.codes.to(torch.float32).reshape(n, self.scales.shape[1], -1)
        if self.zero_points is None:
            grouped = grouped - SYMMETRIC_ZERO
        else:
            grouped = grouped - self.zero_points.to(torch.float32).unsqueeze(-1)
        return (grouped * self.scales.to(torch.float32).unsqueeze(-1)).reshape(n, k).to(dtype)


def quantize(
    weight: Tensor,
    group_size: int,
    *,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> QuantizedWeight:
    """Quantise a weight matrix to INT4 by rounding to nearest (ties to even).

    Args:
        weight: float [N, K].
        group_size: positive divisor of K, or -1 for channelwise.
        symmetric: zero point fixed at 8 if true, else one zero point per group.
        scale_dtype: dtype of the scales; codes are computed against the rounded scales.

    Raises:
        ValueError: the weight is not a finite float matrix, or the group does not divide K.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"expected a float matrix [N, K], got {weight.dtype} {tuple(weight.shape)}"
        )
    n, k = weight.shape
    size = k if group_size == -1 else group_size
    if size <= 0 or k % size:
        raise ValueError(f"group size {group_size} does not divide K = {k}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight has values that are not finite")
    groups = weight.to(torch.float32).reshape(n, k // size, size)
    if symmetric:
        # 7.5 rather than 7 uses all 16 codes; only an extreme positive value is clipped, by half
        # a step. This is the convention of compressed-tensors.
        scales = _storable_scale(groups.abs().amax(-1) / 7.5, scale_dtype)
        zeros = torch.full_like(scales, SYMMETRIC_ZERO, dtype=torch.float32)
    else:
        # The range must contain 0 so that 0.0 has an exact code.
        low = groups.amin(-1).clamp_max(0.0)
        high = groups.amax(-1).clamp_min(0.0)
        scales = _storable_scale((high - low) / _CODE_MAX, scale_dtype)
        zeros = torch.round(-low / scales.to(torch.float32)).clamp(0, _CODE_MAX)
    steps = torch.round(groups / scales.to(torch.float32).unsqueeze(-1))
    codes = (steps + zeros.unsqueeze(-1)).clamp(0, _CODE_MAX).to(torch.uint8).reshape(n, k)
    return QuantizedWeight(codes, scales, None if symmetric else zeros.to(torch.uint8))


def _storable_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to ``dtype``, keeping every one positive so that division by it is defined."""
    rounded = scale.to(dtype).clamp_min(torch.finfo(dtype).tiny)
    return torch.where(scale == 0, torch.ones_like(rounded), rounded)


def pack_nibbles(codes: Tensor, dim: int) -> Tensor:
    """Pack a matrix of nibbles into int32 along ``dim`` (0 or 1), eight per word, low first.

    Args:
        codes: integer matrix, values 0..15. A length along ``dim`` that is no multiple of 8 is
            padded with zero nibbles.
        dim: the packed dimension.

    Returns:
        int32, contiguous; size along ``dim`` is ceil(size / 8).

    Raises:
        ValueError: wrong rank, dtype, dim or a value outside 0..15.
    """
    _require_matrix(codes, dim)
    if codes.is_floating_point():
        raise ValueError(f"nibbles must be integers, got {codes.dtype}")
    wide = codes.to(torch.int64).movedim(dim, 1)
    if wide.numel() and (int(wide.min()) < 0 or int(wide.max()) > _CODE_MAX):
        raise ValueError("nibbles must lie in 0..15")
    rows, size = wide.shape
    words = -(-size // PACK_FACTOR)
    padded = wide.new_zeros(rows, words * PACK_FACTOR)
    padded[:, :size] = wide
    shifts = torch.arange(PACK_FACTOR, dtype=torch.int64) * 4
    packed = (padded.reshape(rows, words, PACK_FACTOR) << shifts).sum(-1)
    # Words with the top bit set are negative as int32.
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return packed.movedim(1, dim).contiguous()


def unpack_nibbles(packed: Tensor, dim: int, size: int) -> Tensor:
    """Invert :func:`pack_nibbles`.

    Args:
        packed: int32 matrix.
        dim: the packed dimension (0 or 1).
        size: number of nibbles along ``dim`` before packing.

    Returns:
        uint8, contiguous, values 0..15, ``size`` long along ``dim``.

    Raises:
        ValueError: wrong rank, dtype or dim, or ``size`` needs a different number of words.
    """
    _require_matrix(packed, dim)
    if packed.dtype != torch.int32:
        raise ValueError(f"packed nibbles must be int32, got {packed.dtype}")
    wide = packed.movedim(dim, 1)
    rows, words = wide.shape
    if words != -(-size // PACK_FACTOR):
        raise ValueError(f"{size} nibbles do not fit {words} words exactly")
    shifts = torch.arange(PACK_FACTOR, dtype=torch.int32) * 4
    nibbles = ((wide.unsqueeze(-1) >> shifts) & 0xF).reshape(rows, words * PACK_FACTOR)
    return nibbles[:, :size].to(torch.uint8).movedim(1, dim).contiguous()


def _require_matrix(tensor: Tensor, dim: int) -> None:
    if tensor.ndim != 2 or dim not in (0, 1):
        raise ValueError(
            f"expected a matrix and dim 0 or 1, got shape {tuple(tensor.shape)} and dim {dim}"
        )


def pack_compressed_tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the compressed-tensors tensors of one module, keyed by suffix."""
    tensors = {
        "weight_packed": pack_nibbles(weight.codes, 1),
        "weight_scale": weight.scales.contiguous(),
        "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
    }
    if weight.zero_points is not None:
        tensors["weight_zero_point"] = pack_nibbles(weight.zero_points, 0)
    return tensors


def unpack_compressed_tensors(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """Invert :func:`pack_compressed_tensors`.

    Raises:
        KeyError: a tensor is missing.
        ValueError: shapes or dtypes contradict one another.
    """
    n, k = (int(size) for size in tensors["weight_shape"])
    codes = unpack_nibbles(tensors["weight_packed"], 1, k)
    scales = tensors["weight_scale"]
    _require_shapes(codes, scales, n, k)
    zeros = tensors.get("weight_zero_point")
    return QuantizedWeight(codes, scales, None if zeros is None else unpack_nibbles(zeros, 0, n))


def pack_gptq(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the GPTQ (v1) tensors of one module, keyed by suffix.

    Raises:
        ValueError: K or N is no multiple of 8 (the layout has no padding), or a zero point is 0
            (the layout stores ``zero - 1``; a reader that adds 1 to the wrapped nibble gets 16).
    """
    n, k = weight.codes.shape
    if k % PACK_FACTOR or n % PACK_FACTOR:
        raise ValueError(f"GPTQ needs N and K to be multiples of 8, got N = {n}, K = {k}")
    zeros = weight.zero_points
    if zeros is None:
        zeros = torch.full(weight.scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8)
    elif not bool((zeros >= _GPTQ_V1_OFFSET).all()):
        raise ValueError("GPTQ v1 cannot store a zero point of 0")
    return {
        "qweight": pack_nibbles(weight.codes.t(), 0),
        "qzeros": pack_nibbles((zeros - _GPTQ_V1_OFFSET).t(), 1),
        "scales": weight.scales.t().contiguous(),
    }


def unpack_gptq(tensors: Mapping[str, Tensor], *, symmetric: bool) -> QuantizedWeight:
    """Invert :func:`pack_gptq`.

    Args:
        tensors: ``qweight``, ``qzeros``, ``scales``.
        symmetric: whether the zero points are known to be 8 and shall be dropped; the layout
            itself does not say.

    Raises:
        KeyError: a tensor is missing.
        ValueError: shapes or dtypes contradict one another, or ``symmetric`` is set although a
            zero point differs from 8.
    """
    qweight = tensors["qweight"]
    k, n = qweight.shape[0] * PACK_FACTOR, qweight.shape[1]
    codes = unpack_nibbles(qweight, 0, k).t().contiguous()
    scales = tensors["scales"].t().contiguous()
    _require_shapes(codes, scales, n, k)
    zeros = unpack_nibbles(tensors["qzeros"], 1, n).t().contiguous() + _GPTQ_V1_OFFSET
    if not symmetric:
        return QuantizedWeight(codes, scales, zeros)
    if not bool((zeros == SYMMETRIC_ZERO).all()):
        raise ValueError("symmetric weights have a zero point other than 8")
    return QuantizedWeight(codes, scales)


def _require_shapes(codes: Tensor, scales: Tensor, n: int, k: int) -> None:
    groups = scales.shape[1]
    if codes.shape != (n, k) or scales.shape[0] != n or groups == 0 or k % groups:
        raise ValueError(
            f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} do not describe "
            f"one [{n}, {k}] weight"
        )
