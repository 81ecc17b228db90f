"""Packing for the Triton kernel: exact round trips, and no unpacked copy of the weight."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from vllm_b70.checkpoints import pack
from vllm_b70.ops.int4_words import pack_words, unpack_words


def values(depth, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (depth, columns), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("depth", "columns", "group_size"),
    [(128, 64, 32), (256, 33, 64), (256, 1, 128), (384, 200, 128), (96, 5, 96), (99, 70, 99)],
)
def test_round_trip(depth, columns, group_size, dtype):
    q = values(depth, columns)
    scale = torch.rand(depth // group_size, columns).to(dtype)
    zero = values(depth // group_size, columns, 1)
    packed = pack_words(lambda a, b: q[a:b], depth, columns, scale, zero, group_size, dtype)
    assert torch.equal(unpack_words(packed), q.to(torch.uint8))
    assert packed.words.shape[1] % 64 == 0 and packed.words.dtype == torch.int32
    assert packed.offset is not None
    one = 0x6400 if dtype == torch.float16 else 0x4300
    assert torch.equal((packed.offset[0, :columns] & 0xFFFF) - one, zero[0].int())
    assert torch.equal(packed.offset >> 16, packed.offset & 0xFFFF)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_against_the_unpack_of_compressed_tensors(group_size):
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    quantised = pack.quantize(w, group_size)
    tensors = pack.pack_compressed_tensors(quantised)
    theirs = unpack_from_int32(tensors["weight_packed"], 4, torch.Size((64, 256))) + 8
    packed = pack_words(
        lambda a, b: theirs.t()[a:b],
        256,
        64,
        quantised.scales.t(),
        None,
        group_size,
        torch.bfloat16,
    )
    assert torch.equal(unpack_words(packed).t(), theirs.to(torch.uint8))
    assert torch.equal(unpack_words(packed).t(), quantised.codes)


def test_a_group_is_all_that_is_ever_unpacked():
    q, asked = values(512, 64), []

    def slices(first, last):
        asked.append(last - first)
        return q[first:last]

    packed = pack_words(slices, 512, 64, torch.rand(4, 64), None, 128, torch.float16)
    assert asked == [128] * 4
    bytes_ = packed.words.numel() * 4 + packed.scale.numel() * 2
    assert bytes_ <= 1.1 * (512 * 64 / 2 + 4 * 64 * 2)


def test_other_group_sizes_are_refused():
    with pytest.raises(ValueError, match="group size 48 is not covered for K=96"):
        pack_words(
            lambda a, b: values(96, 8)[a:b], 96, 8, torch.rand(2, 8), None, 48, torch.float16
        )
