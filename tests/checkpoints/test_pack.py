"""INT4 quantisation and packing, compared with compressed-tensors where that has a counterpart."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from torch import Tensor

from vllm_b70.checkpoints.pack import (
    QuantizedWeight,
    pack_compressed_tensors,
    pack_gptq,
    pack_nibbles,
    quantize,
    unpack_compressed_tensors,
    unpack_gptq,
    unpack_nibbles,
)

GROUPS = [32, 64, 128, -1]


def random_weight(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def assert_same(left: QuantizedWeight, right: QuantizedWeight) -> None:
    assert torch.equal(left.codes, right.codes)
    assert torch.equal(left.scales, right.scales)
    assert left.scales.dtype == right.scales.dtype
    if left.zero_points is None or right.zero_points is None:
        assert left.zero_points is right.zero_points
    else:
        assert torch.equal(left.zero_points, right.zero_points)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(8, 16), (5, 24), (13, 19), (1, 1)])
def test_nibbles_match_compressed_tensors(shape: tuple[int, int], dim: Literal[0, 1]) -> None:
    codes = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(1))
    packed = pack_nibbles(codes, dim)
    signed = (codes - 8).to(torch.int8)
    assert torch.equal(packed, pack_to_int32(signed, 4, packed_dim=dim))
    assert packed.is_contiguous()
    theirs = unpack_from_int32(packed, 4, torch.Size(shape), packed_dim=dim)
    assert torch.equal(theirs, signed)
    assert torch.equal(unpack_nibbles(packed, dim, shape[dim]), codes.to(torch.uint8))


def test_first_nibble_is_lowest_and_top_bit_gives_negative_word() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert pack_nibbles(codes, 1).item() == 0x87654321 - 2**32


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("n", [8, 13])
def test_compressed_tensors_round_trip(n: int, group: int, symmetric: bool) -> None:
    k = 256
    weight = quantize(random_weight(n, k), group, symmetric=symmetric)
    tensors = pack_compressed_tensors(weight)
    groups = 1 if group == -1 else k // group
    assert tensors["weight_packed"].shape == (n, k // 8)
    assert tensors["weight_packed"].dtype == torch.int32
    assert tensors["weight_scale"].shape == (n, groups)
    assert tensors["weight_shape"].tolist() == [n, k]
    if symmetric:
        assert "weight_zero_point" not in tensors
    else:
        assert tensors["weight_zero_point"].shape == (-(-n // 8), groups)
        assert weight.zero_points is not None
        theirs = unpack_from_int32(
            tensors["weight_zero_point"], 4, torch.Size((n, groups)), packed_dim=0
        )
        assert torch.equal(theirs + 8, weight.zero_points.to(torch.int8))
    assert_same(unpack_compressed_tensors(tensors), weight)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_gptq_round_trip(group: int, symmetric: bool) -> None:
    n, k = 24, 256
    weight = quantize(random_weight(n, k), group, symmetric=symmetric)
    tensors = pack_gptq(weight)
    groups = 1 if group == -1 else k // group
    assert tensors["qweight"].shape == (k // 8, n)
    assert tensors["scales"].shape == (groups, n)
    assert tensors["qzeros"].shape == (groups, n // 8)
    if symmetric:
        assert (tensors["qzeros"] == 0x77777777).all()
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert_same(unpack_gptq(tensors, symmetric=symmetric), weight)


def test_both_layouts_hold_the_same_nibbles() -> None:
    weight = quantize(random_weight(16, 64), 32)
    along_k = pack_compressed_tensors(weight)["weight_packed"]
    assert torch.equal(pack_gptq(weight)["qweight"], along_k.t())


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_error_is_bounded_by_the_step(
    group: int, symmetric: bool, scale_dtype: torch.dtype
) -> None:
    weight = random_weight(7, 256)
    quantized = quantize(weight, group, symmetric=symmetric, scale_dtype=scale_dtype)
    assert quantized.scales.dtype == scale_dtype
    assert quantized.group_size == (256 if group == -1 else group)
    step = quantized.scales.float().repeat_interleave(quantized.group_size, dim=1)
    error = (quantized.dequantize() - weight).abs()
    # Half a step from rounding, and at the ends of the range up to 15 steps x 2^-8 because the
    # scale itself is rounded to bfloat16. A rounded zero point shifts the range by up to half a
    # step more.
    assert (error <= step * (0.56 if symmetric else 1.06)).all()
    assert error.mean() < 0.3 * step.mean()


def test_representable_weights_are_exact() -> None:
    codes = torch.arange(16).repeat(3, 4).to(torch.float32)
    symmetric = QuantizedWeight(codes.to(torch.uint8), torch.full((3, 2), 0.25))
    assert torch.equal(symmetric.dequantize(), (codes - 8) * 0.25)
    asymmetric = (codes - 3) * 0.5
    again = quantize(asymmetric, 32, symmetric=False)
    assert torch.equal(again.dequantize(), asymmetric)
    assert again.zero_points is not None and (again.zero_points == 3).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_zero_and_tiny_groups_stay_finite(symmetric: bool, scale_dtype: torch.dtype) -> None:
    weight = torch.zeros(2, 64)
    weight[1] = 1e-12
    quantized = quantize(weight, 32, symmetric=symmetric, scale_dtype=scale_dtype)
    assert (quantized.scales > 0).all()
    assert (quantized.dequantize()[0] == 0).all()
    assert torch.isfinite(quantized.dequantize()).all()


def test_bad_inputs_are_refused() -> None:
    weight = random_weight(8, 96)
    for group in (0, -2, 64, 7):
        with pytest.raises(ValueError, match="does not divide"):
            quantize(weight, group)
    with pytest.raises(ValueError, match="float matrix"):
        quantize(weight[0], 32)
    with pytest.raises(ValueError, match="finite"):
        quantize(torch.full((8, 32), float("nan")), 32)
    with pytest.raises(ValueError, match=r"0\.\.15"):
        pack_nibbles(torch.tensor([[16]]), 1)
    with pytest.raises(ValueError, match="integers"):
        pack_nibbles(torch.zeros(1, 8), 1)
    with pytest.raises(ValueError, match="matrix"):
        pack_nibbles(torch.zeros(8, dtype=torch.int32), 0)
    with pytest.raises(ValueError, match="int32"):
        unpack_nibbles(torch.zeros(1, 1, dtype=torch.int64), 1, 8)
    with pytest.raises(ValueError, match="words"):
        unpack_nibbles(torch.zeros(1, 1, dtype=torch.int32), 1, 9)
    with pytest.raises(ValueError, match="multiples of 8"):
        pack_gptq(quantize(random_weight(7, 32), 32))


def test_gptq_refuses_zero_point_zero() -> None:
    weight = quantize(torch.ones(8, 32), 32, symmetric=False)
    with pytest.raises(ValueError, match="zero point of 0"):
        pack_gptq(weight)


def test_unpack_gptq_refuses_false_symmetry() -> None:
    tensors = pack_gptq(quantize(random_weight(8, 64), 32, symmetric=False))
    with pytest.raises(ValueError, match="other than 8"):
        unpack_gptq(tensors, symmetric=True)


def test_unpack_refuses_contradicting_shapes() -> None:
    tensors = pack_compressed_tensors(quantize(random_weight(8, 64), 32))
    tensors["weight_scale"] = tensors["weight_scale"][:4]
    with pytest.raises(ValueError, match="do not describe"):
        unpack_compressed_tensors(tensors)
