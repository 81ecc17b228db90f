"""Quantising at load: what compressed-tensors' quantiser makes, from a bounded piece at a time."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams

from vllm_b70.ops import int4_quantise
from vllm_b70.ops.int4_linear import unpack_int4
from vllm_b70.ops.int4_words import unpack_words


def tensor(rows, depth, dtype, seed=0):
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed)).to(dtype)


def theirs(weight, group):
    """compressed-tensors' scales, kept in the weight's dtype, and its fake quantise with them."""
    arguments = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=group)
    grouped = weight.float().unflatten(1, (-1, group))
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
    scale = scale.to(weight.dtype).float()
    return scale, fake_quantize(weight.float(), scale, zero, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_it_is_the_fake_quantise_of_compressed_tensors(group, dtype, monkeypatch):
    monkeypatch.setattr(int4_quantise, "PIECE", 64)
    weight = tensor(130, 512, dtype)
    scale, want = theirs(weight, group)
    packed = int4_quantise.quantise_words(weight, None, group)
    assert (packed.columns, packed.depth, packed.group) == (130, 512, min(group, 128))
    values = unpack_words(packed).float() - 8
    dense = values * packed.scale[:, :130].float().repeat_interleave(packed.group, 0)
    assert torch.equal(dense.t(), want)
    assert torch.equal(packed.scale[:: group // packed.group, :130].t().float(), scale)
    nibbles, scales = int4_quantise.quantise_nibbles(weight, None, group)
    dense = (unpack_int4(nibbles, 512).float() - 8) * scales.repeat_interleave(group, 0)
    assert torch.equal(dense.t(), want)


def test_rows_are_gathered(monkeypatch):
    monkeypatch.setattr(int4_quantise, "PIECE", 64)
    weight, rows = tensor(300, 128, torch.bfloat16), torch.arange(5, 299, 3)
    some = int4_quantise.quantise_words(weight, rows, 128)
    whole = int4_quantise.quantise_words(weight, None, 128)
    assert torch.equal(unpack_words(some), unpack_words(whole)[:, rows])
    assert torch.equal(some.scale[:, : len(rows)], whole.scale[:, rows])
    nibbles, scale = int4_quantise.quantise_nibbles(weight, rows, 128)
    assert torch.equal(unpack_int4(nibbles, 128), unpack_words(some))
    assert torch.equal(scale, some.scale[:, : len(rows)].float())


def test_no_more_than_a_piece_is_unpacked(monkeypatch):
    """Each piece is quantised by itself, and the weight is only read."""
    asked = []
    quantize = int4_quantise.quantize

    def watched(piece, *args, **kwargs):
        asked.append(piece.shape[0])
        return quantize(piece, *args, **kwargs)

    monkeypatch.setattr(int4_quantise, "quantize", watched)
    monkeypatch.setattr(int4_quantise, "PIECE", 64)
    weight = tensor(200, 128, torch.bfloat16)
    before = weight.clone()
    int4_quantise.quantise_words(weight, None, 128)
    int4_quantise.quantise_nibbles(weight, None, 128)
    assert asked == [64, 64, 64, 8] * 2 and torch.equal(weight, before)


def test_the_scales_do_not_follow_the_default_dtype():
    """vLLM loads models under the model's dtype as torch's default."""
    weight = tensor(70, 128, torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        scale = int4_quantise.quantise_nibbles(weight, None, 32)[1]
    finally:
        torch.set_default_dtype(torch.float32)
    assert scale.dtype == torch.float32


@pytest.mark.parametrize(
    ("weight", "group", "what"),
    [
        (tensor(64, 192, torch.bfloat16), 128, "does not divide"),
        (tensor(64, 128, torch.bfloat16) / 0, 128, "not finite"),
    ],
)
def test_what_cannot_be_quantised(weight, group, what):
    for quantise in (int4_quantise.quantise_words, int4_quantise.quantise_nibbles):
        with pytest.raises(ValueError, match=what):
            quantise(weight, None, group)
