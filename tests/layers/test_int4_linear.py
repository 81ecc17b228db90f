"""The linear kernel under vLLM: both layouts, told apart by the parameters' declared dimensions."""

import os

import pytest
import torch

pytest.importorskip("vllm")
from vllm.model_executor.kernels.linear.mixed_precision import MPLinearLayerConfig
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
)
from vllm.scalar_type import scalar_types

from vllm_b70.checkpoints import pack
from vllm_b70.layers import int4_linear, native
from vllm_b70.layers.int4_linear import (
    CpuInt4LinearKernel,
    GpuInt4LinearKernel,
    NativeInt4LinearKernel,
    pack_nibbles,
    unpack_nibbles,
)
from vllm_b70.ops import native as ops
from vllm_b70.ops.int4_words import Int4Words, unpack_words
from vllm_b70.reference.int4_linear import int4_linear as reference
from vllm_b70.settings import Settings


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    import vllm.model_executor.parameter as parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)


def config(depth, columns, group_size, symmetric, dtype=torch.bfloat16):
    kind = scalar_types.uint4b8 if symmetric else scalar_types.uint4
    shape = (depth, columns)
    return MPLinearLayerConfig(shape, shape, kind, dtype, group_size, not symmetric)


def loader(*args, **kwargs):
    raise AssertionError("nothing is loaded here")


def packed(data, input_dim, output_dim, packed_dim):
    return PackedvLLMParameter(
        data=data,
        input_dim=input_dim,
        output_dim=output_dim,
        packed_dim=packed_dim,
        packed_factor=8,
        weight_loader=loader,
    )


def scales(data, input_dim, output_dim, channelwise):
    if channelwise:
        return ChannelQuantScaleParameter(data=data, output_dim=output_dim, weight_loader=loader)
    return GroupQuantScaleParameter(
        data=data, input_dim=input_dim, output_dim=output_dim, weight_loader=loader
    )


def compressed_tensors(weight, channelwise=False):
    """A layer as CompressedTensorsWNA16 leaves it before processing."""
    layer = torch.nn.Module()
    tensors = pack.pack_compressed_tensors(weight)
    layer.weight_packed = packed(tensors["weight_packed"], 1, 0, 1)
    layer.weight_scale = scales(tensors["weight_scale"], 1, 0, channelwise)
    if weight.zero_points is not None:
        layer.weight_zero_point = packed(tensors["weight_zero_point"], 1, 0, 0)
    return layer, ("weight_packed", "weight_scale", "weight_zero_point")


def gptq(weight, channelwise=False):
    """A layer as AutoGPTQLinearMethod leaves it before processing."""
    layer = torch.nn.Module()
    tensors = pack.pack_gptq(weight)
    layer.qweight = packed(tensors["qweight"], 0, 1, 0)
    layer.scales = scales(tensors["scales"], 0, 1, channelwise)
    layer.qzeros = packed(tensors["qzeros"], 0, 1, 1)
    return layer, ("qweight", "scales", "qzeros")


def expected(weight, x, bias=None):
    depth = weight.codes.shape[1]
    group = depth // weight.scales.shape[1]
    zero = None if weight.zero_points is None else weight.zero_points.t()
    return reference(x, weight.codes.t(), weight.scales.t(), zero, bias, group)


def run(layer, names, c, x, bias=None):
    kernel = CpuInt4LinearKernel(c, *names)
    kernel.process_weights_after_loading(layer)
    return kernel.apply_weights(layer, x, bias)


def quantised(columns, depth, group_size, symmetric, dtype=torch.bfloat16):
    w = torch.randn(columns, depth, generator=torch.Generator().manual_seed(0))
    return pack.quantize(w, group_size, symmetric=symmetric, scale_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("columns", [64, 33])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(symmetric, columns, group_size, dtype):
    weight = quantised(columns, 128, group_size, symmetric, dtype)
    layer, names = compressed_tensors(weight, group_size == -1)
    x = torch.randn(5, 128).to(dtype)
    got = run(layer, names, config(128, columns, group_size, symmetric, dtype), x)
    assert torch.equal(got, expected(weight, x))


def test_compressed_tensors_channelwise_with_odd_k_and_bias():
    weight = quantised(33, 99, -1, True)
    layer, names = compressed_tensors(weight, True)
    x, bias = torch.randn(3, 99).bfloat16(), torch.randn(33).bfloat16()
    got = run(layer, names, config(99, 33, -1, True), x, bias)
    assert torch.equal(got, expected(weight, x, bias))


@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_gptq(group_size):
    weight = quantised(64, 128, group_size, True)
    layer, names = gptq(weight, group_size == -1)
    x = torch.randn(5, 128).bfloat16()
    got = run(layer, names, config(128, 64, group_size, True), x)
    assert torch.equal(got, expected(weight, x))


def test_layouts_are_told_apart_where_their_shapes_coincide():
    """N = 16 and K = 128: both layouts hold a [16, 16] int32 matrix."""
    weight = quantised(16, 128, 8 * 16 // 16 * 4, True)
    x = torch.randn(5, 128).bfloat16()
    first, names = compressed_tensors(weight)
    second, other = gptq(weight)
    assert first.weight_packed.shape == second.qweight.shape == (16, 16)
    c = config(128, 16, 32, True)
    assert torch.equal(run(first, names, c, x), expected(weight, x))
    assert torch.equal(run(second, other, c, x), expected(weight, x))


def test_leading_dimensions_are_kept_and_the_checkpoints_tensors_are_dropped():
    weight = quantised(64, 128, 32, True)
    layer, names = compressed_tensors(weight)
    x = torch.randn(2, 3, 128).bfloat16()
    got = run(layer, names, config(128, 64, 32, True), x)
    assert got.shape == (2, 3, 64) and not hasattr(layer, "weight_packed")
    assert list(layer.state_dict()) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight_type": scalar_types.uint8b128}, "only 4-bit"),
        ({"act_type": torch.float32}, "only 16-bit"),
        ({"group_size": 48}, "48 does not divide K=128"),
    ],
)
def test_what_it_cannot_implement_it_says(change, reason):
    c = config(128, 64, 32, True)
    for name, value in change.items():
        setattr(c, name, value)
    can, why = CpuInt4LinearKernel.can_implement(c)
    assert not can and reason in why


@pytest.mark.parametrize("layout", [compressed_tensors, gptq])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("columns", [64, 40])
def test_the_gpu_kernel_packs_both_layouts(layout, group_size, columns):
    """What the kernel computes from the words is shown in tests/kernels and tests/gpu."""
    symmetric = layout is gptq
    weight = quantised(columns, 256, group_size, symmetric)
    layer, names = layout(weight, group_size == -1)
    c = config(256, columns, group_size, symmetric)
    assert GpuInt4LinearKernel.can_implement(c) == (True, None)
    kernel = GpuInt4LinearKernel(c, *names)
    kernel.process_weights_after_loading(layer)
    packed = Int4Words(
        layer.b70_words, layer.b70_scale, layer.b70_offset, 256, kernel.columns, kernel.group
    )
    assert torch.equal(unpack_words(packed).t(), weight.codes)
    assert kernel.columns == columns and not layer.b70_done.any()
    assert (layer.b70_offset is None) == symmetric
    assert not any(hasattr(layer, name) for name in names)


def test_a_group_size_that_the_gpu_kernel_lacks_is_said():
    can, why = GpuInt4LinearKernel.can_implement(config(256, 64, 16, True))
    assert not can and "group size 16 is not covered" in why


@pytest.mark.parametrize("linear", ["triton", "native", "auto"])
def test_ours_is_the_first_kernel_that_vllm_may_pick(linear, monkeypatch):
    from vllm.model_executor.kernels import linear as kernels
    from vllm.platforms import PlatformEnum

    monkeypatch.setattr(
        kernels, "_POSSIBLE_KERNELS", {k: list(v) for k, v in kernels._POSSIBLE_KERNELS.items()}
    )
    monkeypatch.setattr(int4_linear, "_POSSIBLE_KERNELS", kernels._POSSIBLE_KERNELS)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "SomethingElse")
    int4_linear.register(linear)
    disabled = os.environ["VLLM_DISABLED_KERNELS"].split(",")
    assert "SomethingElse" in disabled and "MarlinLinearKernel" in disabled
    for platform, ours in (
        (PlatformEnum.CPU, CpuInt4LinearKernel),
        (PlatformEnum.CUDA, GpuInt4LinearKernel),
        (PlatformEnum.XPU, GpuInt4LinearKernel if linear == "triton" else NativeInt4LinearKernel),
    ):
        enabled = [k for k in kernels._POSSIBLE_KERNELS[platform] if k.__name__ not in disabled]
        assert enabled == [ours]


#: The native route: the vendor's layout, and the way back to ours.
DEPTH, COLUMNS = 128, 96


def product(weight, scale, zero, group):
    """What the vendor's kernel computes from its own layout, in plain torch."""
    assert weight.dtype == torch.int32 and weight.shape == (COLUMNS, DEPTH // 8)
    q = unpack_nibbles(weight, 1).t().float()
    if zero.dim() == 1:
        assert zero.dtype == torch.int8
        z = zero.float()
    else:
        z = unpack_nibbles(zero, 1).float().repeat_interleave(group, 0)
    dense = (q - z) * scale.float().repeat_interleave(group, 0)
    return lambda x: (x.float() @ dense).to(x.dtype)


@pytest.fixture
def vendor(monkeypatch):
    monkeypatch.setattr(native, "current", lambda: Settings(linear="native"))
    monkeypatch.setattr(ops, "has_int4_gemm", lambda: True)
    monkeypatch.setattr(ops, "int4_gemm", product)
    native.take_waiting()


def small(symmetric, group):
    weight = torch.randn(COLUMNS, DEPTH, generator=torch.Generator().manual_seed(1))
    return pack.quantize(weight, group_size=group, symmetric=symmetric)


def loaded(make, symmetric, group, kernel_class=NativeInt4LinearKernel):
    weight = small(symmetric, group)
    layer, names = make(weight, group == DEPTH)
    kernel = kernel_class(config(DEPTH, COLUMNS, group, symmetric), *names)
    kernel.process_weights_after_loading(layer)
    return layer, kernel


CASES = [
    (compressed_tensors, True, 32),
    (compressed_tensors, True, 128),
    (compressed_tensors, False, 64),
    (gptq, True, 32),
]


@pytest.mark.parametrize(("make", "symmetric", "group"), CASES)
def test_both_layouts_reach_the_vendors_kernel(make, symmetric, group, vendor):
    layer, kernel = loaded(make, symmetric, group)
    (waiting,) = native.take_waiting()
    assert waiting.op == "int4_linear" and (waiting.columns, waiting.depth) == (COLUMNS, DEPTH)
    assert waiting.shape == f"96x128 group {group}{'' if symmetric else ' asymmetric'} bfloat16"
    waiting.settle((1, 16, 1))
    x = torch.randn(40, DEPTH).bfloat16()
    bias = torch.randn(COLUMNS).bfloat16()
    got = kernel.apply_weights(layer, x, bias)
    weight = small(symmetric, group)
    zero = torch.tensor([[8]]) if symmetric else weight.zero_points
    spread = [
        t.float().repeat_interleave(group, 1)
        for t in (zero.expand_as(weight.scales), weight.scales)
    ]
    dense = (weight.codes.float() - spread[0]) * spread[1]
    want = (x.float() @ dense.t()).bfloat16() + bias
    assert torch.allclose(got.float(), want.float(), atol=0.1, rtol=0.02)


@pytest.mark.parametrize(("make", "symmetric", "group"), CASES)
def test_the_way_back_gives_what_our_kernel_would_have_loaded(make, symmetric, group, vendor):
    want, _ = loaded(make, symmetric, group, GpuInt4LinearKernel)
    got, kernel = loaded(make, symmetric, group)
    (waiting,) = native.take_waiting()
    waiting.settle(())
    assert got.b70_native == () and not hasattr(got, "b70_packed")
    for name, buffer in want.named_buffers():
        assert torch.equal(getattr(got, name), buffer), name
    assert {name for name, _ in got.named_buffers()} == {name for name, _ in want.named_buffers()}


@pytest.mark.parametrize("there", [True, False])
def test_what_the_vendor_does_not_cover_stays_ours(there, vendor, monkeypatch):
    monkeypatch.setattr(ops, "has_int4_gemm", lambda: there)
    weight = pack.quantize(
        torch.randn(COLUMNS, 144 if there else DEPTH), group_size=16 + 16 * (not there)
    )
    layer, names = compressed_tensors(weight)
    depth, group = (144, 16) if there else (DEPTH, 32)
    kernel = NativeInt4LinearKernel(config(depth, COLUMNS, group, True), *names)
    if there:
        with pytest.raises(ValueError, match="group size 16"):
            kernel.process_weights_after_loading(layer)
    else:
        kernel.process_weights_after_loading(layer)
        assert hasattr(layer, "b70_words")
    assert native.take_waiting() == []


def test_a_layer_that_nobody_settled_multiplies_nothing(vendor):
    layer, kernel = loaded(compressed_tensors, True, 32)
    with pytest.raises(native.PluginError, match="no route was chosen"):
        kernel.apply_weights(layer, torch.randn(2, DEPTH).bfloat16())


def test_nibbles_there_and_back():
    values = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(values), 1), values)
