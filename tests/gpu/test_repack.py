"""Repacking at load keeps to 1.1 times the weight's memory on the device."""

import pytest
import torch

pytest.importorskip("vllm")
from vllm.model_executor.kernels.linear.mixed_precision import MPLinearLayerConfig
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.scalar_type import scalar_types

from vllm_b70.layers.int4_linear import GpuInt4LinearKernel
from vllm_b70.ops.int4_words import Int4Words, unpack_words


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    import vllm.model_executor.parameter as parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_peak_memory_of_a_repack(layout):
    columns, depth, group = 24576, 4096, 128
    first = {"compressed-tensors": (columns, depth // 8), "gptq": (depth // 8, columns)}[layout]
    dims = (
        dict(input_dim=1, output_dim=0) if first[0] == columns else dict(input_dim=0, output_dim=1)
    )
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layer = torch.nn.Module()
    layer.q = PackedvLLMParameter(
        data=torch.randint(-(2**31), 2**31 - 1, first, dtype=torch.int32, device="cuda"),
        packed_dim=dims["input_dim"], packed_factor=8, weight_loader=print, **dims,
    )  # fmt: skip
    scale = torch.rand(columns, depth // group, device="cuda").half()
    scale = scale if layout == "compressed-tensors" else scale.t().contiguous()
    layer.s = GroupQuantScaleParameter(data=scale, weight_loader=print, **dims)
    del scale
    weight = torch.cuda.memory_allocated() - before
    # The last word of the first column and of the last, as the checkpoint has them.
    words = [layer.q.data[i].item() for i in ((0, -1), (-1, -1))]
    if layout == "gptq":
        words = [layer.q.data[i].item() for i in ((-1, 0), (-1, -1))]
    want = [[w >> 4 * i & 15 for i in range(8)] for w in words]
    torch.cuda.reset_peak_memory_stats()
    kind = MPLinearLayerConfig(
        (depth, columns), (depth, columns), scalar_types.uint4b8, torch.float16, group, False
    )
    kernel = GpuInt4LinearKernel(kind, "q", "s", None)
    kernel.process_weights_after_loading(layer)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"peak {peak / weight:.3f} of the weight")
    assert peak <= 1.1 * weight
    packed = Int4Words(
        layer.b70_words, layer.b70_scale, layer.b70_offset, depth, kernel.columns, kernel.group
    )
    values = unpack_words(packed)
    assert [values[-8:, 0].tolist(), values[-8:, -1].tolist()] == want
