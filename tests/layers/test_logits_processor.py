"""Our logits processor gives vLLM's logits, without NaN."""

import types

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.sample.sampler import Sampler

from vllm_b70.layers.logits_processor import RowInvariantLogitsProcessor

NAN, INF = float("nan"), float("inf")


def processor(vocabulary):
    made = object.__new__(RowInvariantLogitsProcessor)
    torch.nn.Module.__init__(made)
    made.scale, made.soft_cap, made.head_dtype = 1.0, None, None
    made.logits_as_input, made.org_vocab_size = False, vocabulary
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_nan_is_minus_infinity_and_nothing_else_changes(dtype):
    rows = torch.tensor(
        [[1.0, NAN, 3.0, -0.0, 9.0], [INF, -INF, NAN, INF, 9.0], [NAN] * 5], dtype=dtype
    )
    want = torch.tensor([[1.0, -INF, 3.0, -0.0], [INF, -INF, -INF, INF], [-INF] * 4], dtype=dtype)
    method = types.SimpleNamespace(apply=lambda layer, x, bias: x.clone())
    head = types.SimpleNamespace(quant_method=method, tp_size=1)
    # The last column is padding of the vocabulary.
    got = processor(4)(head, rows).contiguous()
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert Sampler.greedy_sample(got.float()).tolist() == [2, 0, 0]
