"""Drafting from 4-bit copies: what they give, what they leave alone, and what is refused."""

import types

import pytest
import torch

pytest.importorskip("vllm")
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from vllm_b70.checkpoints.pack import quantize
from vllm_b70.layers import draft, linear
from vllm_b70.layers.logits_processor import RowInvariantLogitsProcessor
from vllm_b70.plugin import PluginError
from vllm_b70.reference.int4_linear import int4_linear as reference

DTYPE = torch.bfloat16


def tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def target_head(weight, padding=0, start=0, method=linear.RowInvariantEmbeddingMethod):
    """An lm_head as vLLM's loader leaves it."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.shard_indices = types.SimpleNamespace(
        num_org_vocab_padding=padding,
        org_vocab_start_index=start,
        org_vocab_end_index=start + len(weight) - padding,
    )
    layer.tp_size = 1
    layer.quant_method = method()
    return layer


def draft_head(target, group=128, listed=None):
    model = types.SimpleNamespace(lm_head=target)
    head = draft.DraftHead(draft.DraftHeadMethod(model, group, listed, "LIST"))
    head.quant_method.process_weights_after_loading(head)
    return head


def processor(columns, scale=1.0):
    made = object.__new__(RowInvariantLogitsProcessor)
    torch.nn.Module.__init__(made)
    made.scale, made.soft_cap, made.head_dtype, made.logits_as_input = scale, None, None, False
    made.org_vocab_size = columns
    return made


def expected(weight, x, group=128):
    """Logits over compressed-tensors' convention of the weight."""
    packed = quantize(weight, group, scale_dtype=DTYPE)
    return reference(x, packed.codes.t(), packed.scales.t(), None, None, group)


@pytest.mark.parametrize("group", [32, 256])
def test_the_head_is_the_quantised_head(group):
    weight, x = tensor(70, 256), tensor(9, 256, seed=1)
    head = draft_head(target_head(weight), group)
    logits = processor(70)(head, x)
    assert torch.equal(logits, expected(weight, x, group))
    assert not torch.equal(logits, torch.nn.functional.linear(x, weight))
    assert torch.equal(processor(70).get_top_tokens(head, x), logits.float().argmax(-1))


@pytest.mark.parametrize("start", [0, 1000])
def test_a_shortlist_scores_the_listed_rows_of_the_shard_alone(start):
    weight, x = tensor(72, 256), tensor(33, 256, seed=1)
    weight[70:] = 50.0  # padding: would win
    target = target_head(weight, padding=2, start=start)
    listed = [3, *range(start + 10, start + 70, 2), 5000]
    here = [token - start for token in listed if start <= token < start + 70]
    head = draft_head(target, listed=listed)
    logits = head.quant_method.apply(head, x)
    assert logits.shape == (33, 72) and torch.equal(logits[:, here], expected(weight[here], x))
    others = [row for row in range(72) if row not in here]
    assert (logits[:, others] == float("-inf")).all()
    want = logits.float().argmax(-1) + start
    assert torch.equal(processor(72).get_top_tokens(head, x), want)
    # The way of vLLM's own processor, over the row of logits, gives the same.
    assert torch.equal(LogitsProcessor.get_top_tokens(processor(72), head, x), want)
    assert len(want.unique()) > 5


def test_sampled_drafts_have_the_distribution_that_rejection_is_told():
    """A token that is not scored has probability zero, in the row that is sampled and kept."""
    head = draft_head(target_head(tensor(70, 256)), listed=[1, 2, 69])
    chance = processor(70)(head, tensor(4, 256, seed=1)).float().softmax(-1)
    assert torch.equal(chance.nonzero()[:, 1].unique(), torch.tensor([1, 2, 69]))
    assert torch.allclose(chance.sum(-1), torch.ones(4))


def test_the_targets_head_is_left_alone():
    weight, x = tensor(70, 256), tensor(5, 256, seed=1)
    target = target_head(weight)
    target.quant_method.process_weights_after_loading(target)
    linear.prepare(target, weight)
    before, address = target.quant_method.apply(target, x), target.weight.data_ptr()
    head = draft_head(target, listed=[1, 2, 3])
    draft_head(target)
    assert target.weight.data_ptr() == address and torch.equal(target.weight, tensor(70, 256))
    assert torch.equal(target.quant_method.apply(target, x), before)
    own = {buffer.data_ptr() for buffer in head.buffers()}
    assert own.isdisjoint(t.data_ptr() for t in [target.weight, *target.buffers()])
    assert not list(head.parameters()), "a checkpoint has nothing to load into it"
    assert head.quant_method._model is None, "it would keep the loaded head alive"


@pytest.mark.parametrize(
    ("target", "group", "listed", "what"),
    [
        (target_head(tensor(70, 192)), 128, None, "group size 128 does not divide K=192"),
        (target_head(tensor(70, 128).float()), 128, None, "torch.float32"),
        (target_head(tensor(70, 128) / 0), 128, None, "not finite"),
        (target_head(tensor(70, 128), method=draft.RowInvariantLinearMethod), 128, None, "16-bit"),
        (target_head(tensor(70, 128)), 128, [70, 99], "shortlist LIST has no token of 0 to 69"),
    ],
)
def test_what_cannot_be_honoured_is_one_sentence(target, group, listed, what):
    with pytest.raises(PluginError, match=what) as error:
        draft_head(target, group, listed)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_weights_that_are_loaded_again_are_refused_with_one_sentence():
    head = draft_head(target_head(tensor(70, 128)))
    with pytest.raises(PluginError, match="weights are loaded again.*start the server") as error:
        head.quant_method.process_weights_after_loading(head)
    assert "\n" not in str(error.value)


class Layer(LinearBase):
    """A linear as vLLM's loader leaves it."""

    def __init__(self, method, weight=None):
        torch.nn.Module.__init__(self)
        self.quant_method, self.prefix = method, "mtp.fc"
        if weight is not None:
            self.weight = torch.nn.Parameter(weight, requires_grad=False)


def test_the_layers_16_bit_linears_are_quantised_and_others_left(caplog):
    weight, x = tensor(70, 256), tensor(2, 3, 256, seed=1)
    own, packed = Layer(linear.RowInvariantLinearMethod(), weight), Layer(object())
    before = packed.quant_method
    with caplog.at_level("INFO", "vllm.vllm_b70"):
        draft.quantise_linears(torch.nn.ModuleList([own, packed]))
    assert "quantises 1 linears of the MTP layer; 1 are in 4 bit" in caplog.text
    assert packed.quant_method is before
    own.quant_method.process_weights_after_loading(own)
    got = own.quant_method.apply(own, x)
    assert torch.equal(got, expected(weight, x.reshape(6, 256)).view(2, 3, 70))
    assert own.weight.numel() == 0, "the 16-bit weight is not kept beside it"


def test_a_layer_that_cannot_be_quantised():
    layer = Layer(draft.DraftLinearMethod(), tensor(70, 192))
    with pytest.raises(PluginError, match="VLLM_B70_DRAFT_LAYER=int4 .* mtp.fc: group size 128"):
        layer.quant_method.process_weights_after_loading(layer)
