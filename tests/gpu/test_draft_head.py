"""The 4-bit draft head on a GPU: the argmax of its logits in every tile, and how it is made."""

import pytest
import torch

from vllm_b70.ops import int4_argmax, int4_gemm, int4_quantise, tiles
from vllm_b70.ops.int4_words import unpack_words
from vllm_b70.ops.tiles import Tile
from vllm_b70.reference import linear as reference

SHAPES = [(248320, 4096), (65536, 4096), (124160, 5120), (1000, 512), (70, 256)]
ROWS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 300]
TILES = [
    Tile("walk", 64, 8, 4, 4),
    Tile("walk", 64, 16, 4, 6),
    Tile("walk", 128, 16, 8, 4),
    Tile("walk", 256, 32, 8, 3),
    Tile("walk", 128, 8, 4, 3, unroll=2),
    Tile("walk", 128, 64, 8, 3),
]


def tensor(rows, depth, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, depth, device="cuda", generator=generator).to(dtype)


def head(columns, depth, dtype, group=128):
    """Made of a weight whose first third comes again, so that every row has ties in many tiles."""
    weight = tensor(columns, depth, dtype)
    weight[columns // 3 :] = weight[: columns - columns // 3].clone()
    return int4_quantise.quantise_words(weight, None, group)


def logits(x, packed):
    done = torch.zeros(int4_gemm.counters(packed.columns), dtype=torch.int32, device="cuda")
    return int4_gemm.apply(x, packed, None, done, 0).float()


def best(x, packed):
    return int4_argmax.int4_argmax(x, packed.words, packed.scale, packed.columns, packed.group)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_argmax_of_the_logits(shape, dtype):
    """torch's argmax over the logits of ``int4_gemm`` is the oracle: ties to the lowest."""
    packed, x = head(*shape, dtype), tensor(300, shape[1], dtype, 1)
    rows = logits(x, packed)
    want = rows.argmax(-1)
    assert (want < shape[0] // 3).any()
    for count in ROWS:
        value, index = best(x[:count].contiguous(), packed)
        assert torch.equal(index, want[:count]), f"{count} rows"
        assert torch.equal(value, rows.amax(-1)[:count])


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.bn}x{tile.bm}-{tile.unroll}")
def test_every_tile_with_every_group(tile, group):
    packed, x = head(5000, 1024, torch.bfloat16, group), tensor(65, 1024, torch.bfloat16, 1)
    want = logits(x, packed)
    value = torch.empty(65, device="cuda")
    index = torch.empty(65, dtype=torch.int64, device="cuda")
    for ptx in (True, False):
        int4_argmax.launch(x, packed, value, index, int4_argmax.parts_of(packed), tile, ptx)
        assert torch.equal(index, want.argmax(-1)) and torch.equal(value, want.amax(-1))


def test_nan_infinity_and_padding():
    packed, x = head(1000, 512, torch.float16), tensor(5, 512, torch.float16, 1)
    x[0] = -x[0].abs()
    packed.scale[:, 1000:] = float("inf")
    first = best(x, packed)[1]
    assert (first < 1000).all(), "columns that only fill the last tile"
    packed.scale[0, first] = packed.scale[0, 700] = float("nan")
    want = reference.best(logits(x, packed))
    value, index = best(x, packed)
    assert torch.equal(index, want[1]) and torch.equal(value, want[0])
    assert (index != first).all(), "a NaN is minus infinity"
    packed.scale[:] = float("nan")
    value, index = best(x, packed)
    assert (value == float("-inf")).all() and (index == 0).all()


def test_in_a_graph():
    packed = head(65536, 4096, torch.bfloat16)
    for count in (1, 8, 64):
        static = tensor(count, 4096, torch.bfloat16)
        best(static, packed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            index = torch.ops.vllm_b70.int4_argmax(
                static, packed.words, packed.scale, packed.columns, packed.group
            )[1]
        for seed in (1, 2, 1):
            static.copy_(tensor(count, 4096, torch.bfloat16, seed))
            graph.replay()
            assert torch.equal(index, logits(static, packed).argmax(-1))


def test_made_of_the_head_in_bounded_memory_and_the_head_is_left_alone():
    weight = tensor(65536, 4096, torch.bfloat16)
    before, address = weight.clone(), weight.data_ptr()
    int4_quantise.quantise_words(weight[:4096], None, 128)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    packed = int4_quantise.quantise_words(weight, None, 128)
    own = packed.words.nbytes + packed.scale.nbytes
    peak = torch.cuda.max_memory_allocated() - held - own
    # A piece in fp32, a few times over for its arithmetic.
    assert peak <= 6 * 4 * int4_quantise.PIECE * 4096, f"{peak / 2**20:.0f} MiB"
    assert weight.data_ptr() == address and torch.equal(weight, before)
    rows = torch.arange(100, 65000, 7, device="cuda")
    some = int4_quantise.quantise_words(weight, rows, 128)
    assert torch.equal(unpack_words(some), unpack_words(packed)[:, rows])


def test_every_table_entry_launches():
    family = tiles.family(torch.device("cuda"))
    for columns, depth in SHAPES[:3]:
        packed, x = head(columns, depth, torch.float16), tensor(64, depth, torch.float16, 1)
        want = logits(x, packed).argmax(-1)
        for bound, _ in tiles.plan(int4_argmax.OP, family, columns, depth, depth // 128).tiles:
            count = min(bound, 64)
            assert torch.equal(best(x[:count].contiguous(), packed)[1], want[:count])
