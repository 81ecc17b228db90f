"""vLLM's layers over the GPU kernels, on CPU tensors that pose as a GPU's."""

import types

import pytest
import torch

pytest.importorskip("vllm")
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from vllm_b70.layers import draft, linear
from vllm_b70.layers.int4_linear import GpuInt4LinearKernel
from vllm_b70.layers.logits_processor import RowInvariantLogitsProcessor
from vllm_b70.ops import gemm
from vllm_b70.reference.linear import linear as reference


def tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.float16)


def head(weight, padding=0, start=0, ranks=1):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.register_buffer("b70_done", torch.zeros(gemm.counters(len(weight)), dtype=torch.int32))
    layer.shard_indices = types.SimpleNamespace(
        num_org_vocab_padding=padding,
        org_vocab_start_index=start,
        org_vocab_end_index=start + len(weight) - padding,
    )
    layer.tp_size = ranks
    layer.quant_method = linear.RowInvariantEmbeddingMethod()
    return layer


def processor(scale=1.0, soft_cap=None):
    made = object.__new__(RowInvariantLogitsProcessor)
    torch.nn.Module.__init__(made)
    made.scale, made.soft_cap, made.head_dtype, made.logits_as_input = scale, soft_cap, None, False
    return made


@pytest.mark.parametrize(
    "method", [linear.RowInvariantLinearMethod, linear.RowInvariantEmbeddingMethod]
)
def test_off_the_cpu_the_weight_serves_as_it_is(method):
    layer = head(tensor(70, 256))
    x, bias = tensor(2, 3, 256, seed=1), tensor(70, seed=2)
    got = method().apply(layer, x, bias)
    parts = gemm.parts_of(layer.weight)
    want = reference(x.reshape(6, 256), layer.weight, bias, parts)
    assert torch.equal(got, want.view(2, 3, 70)) and not layer.b70_done.any()


@pytest.mark.parametrize("bias", [None, tensor(70, seed=3)])
def test_top_tokens_are_those_of_the_logits(bias):
    weight = tensor(70, 256)
    weight[40:64] = weight[:24]
    weight[64:] = 50.0  # padding: would win
    layer, x = head(weight, padding=6), tensor(33, 256, seed=1)
    got = processor().get_top_tokens(layer, x, bias)
    assert torch.equal(got, LogitsProcessor.get_top_tokens(processor(), layer, x, bias))
    assert (got < 40).any() and (got < 64).all()


@pytest.mark.parametrize("change", [{"scale": 0.5}, {"soft_cap": 30.0}])
def test_what_rounds_logits_again_goes_vllms_way(change, monkeypatch):
    monkeypatch.setattr(torch.ops.vllm_b70, "gemm_argmax", None)
    layer, x = head(tensor(70, 256)), tensor(3, 256, seed=1)
    want = LogitsProcessor.get_top_tokens(processor(**change), layer, x)
    assert torch.equal(processor(**change).get_top_tokens(layer, x), want)
    # A NaN is minus infinity after the soft cap too, not the least that a cap leaves.
    layer.weight.fill_(-1.0)
    layer.weight[0] = float("nan")
    assert (processor(**change).get_top_tokens(layer, x.abs()) == 1).all()


def test_ranks_combine_to_the_lowest_column(monkeypatch):
    weight = tensor(128, 256)
    weight[100], weight[70] = weight[30], weight[31]
    x = torch.cat([weight[30:32] * 4, tensor(20, 256, seed=1)])
    want = processor().get_top_tokens(head(weight), x)
    assert want[:2].tolist() == [30, 31]
    calls = []

    def gather(tensor, dim):
        """What the ranks that ran so far gave: each gathers its values, then its columns."""
        calls.append(tensor)
        return torch.cat(calls[(len(calls) - 1) % 2 :: 2], dim=dim)

    monkeypatch.setattr("vllm_b70.layers.logits_processor.tensor_model_parallel_all_gather", gather)
    processor().get_top_tokens(head(weight[:64].clone(), ranks=2), x)
    got = processor().get_top_tokens(head(weight[64:].clone(), start=64, ranks=2), x)
    assert torch.equal(got, want)


@pytest.mark.parametrize("group", [64, 256])
@pytest.mark.parametrize("listed", [None, [2, 1003, *range(1010, 1068, 2)]])
def test_a_drafts_top_tokens_are_those_of_its_logits_and_no_row_is_made(listed, group, monkeypatch):
    monkeypatch.setattr(draft, "CpuInt4LinearKernel", GpuInt4LinearKernel)
    weight = tensor(70, 256)
    weight[40:64] = weight[:24]
    weight[68:] = 50.0  # padding: would win
    model = types.SimpleNamespace(lm_head=head(weight, padding=2, start=1000))
    drafting = draft.DraftHead(draft.DraftHeadMethod(model, group, listed, "LIST"))
    drafting.quant_method.process_weights_after_loading(drafting)
    x = tensor(33, 256, seed=1)
    want = LogitsProcessor.get_top_tokens(processor(), drafting, x)
    monkeypatch.setattr(torch.ops.vllm_b70, "int4_gemm", None)
    got = processor().get_top_tokens(drafting, x)
    assert torch.equal(got, want) and len(got.unique()) > 5
    assert (got < 1068).all() and (listed is None or set(got.tolist()) <= set(listed))
