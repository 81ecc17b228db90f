"""The 4-bit draft head on a GPU: one answer in every tile, near its logits'; how it is made."""

import pytest
import torch

from vllm_b70.ops import int4_argmax, int4_gemm, int4_quantise, tiles
from vllm_b70.ops.int4_words import pack_words, unpack_words
from vllm_b70.ops.tiles import Tile
from vllm_b70.reference import int4_draft as draft

SHAPES = [(248320, 4096), (65536, 4096), (124160, 5120), (1000, 512), (70, 256)]
ROWS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 300]
TILES = [
    Tile("walk", 128, 16, 4, 4),
    Tile("walk", 64, 16, 4, 6, ahead=512),
    Tile("walk", 128, 16, 8, 4),
    Tile("walk", 256, 16, 4, 4),
    Tile("walk", 256, 32, 8, 3),
    Tile("walk", 128, 32, 4, 3),
    Tile("walk", 64, 64, 4, 3),
    Tile("walk", 256, 64, 8, 3),
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


def check_near(x, packed, value, index):
    """Each row's column has float64's best logit up to the roundings, and its value is that."""
    columns, group = packed.columns, packed.group
    q = unpack_words(packed).double() - 8
    scale = packed.scale[:, :columns].double().repeat_interleave(group, 0)
    exact = x.double() @ (q * scale)
    chosen = exact.gather(1, index[:, None])[:, 0]
    # Half a spacing of the dtype for each of two roundings, and what fp32 sums differ by.
    most = torch.finfo(x.dtype).eps * exact.amax(1).abs() + 1e-4 * exact.abs().amax(1)
    assert (chosen >= exact.amax(1) - most).all() and ((value - chosen).abs() <= most).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_count_gives_one_answer_near_that_of_the_logits(shape, dtype):
    """Of equal columns, of which each row has some, the lowest; its logit by ``int4_gemm``, whose
    arithmetic is another one, is the best or next to it."""
    packed, x = head(*shape, dtype), tensor(300, shape[1], dtype, 1)
    rows = logits(x, packed)
    value, index = best(x, packed)
    third = shape[0] // 3
    # The first third of the columns comes again at once: the lower of two that tie is taken.
    assert not ((third <= index) & (index < 2 * third)).any() and (index < third).any()
    chosen, spacing = rows.gather(1, index[:, None])[:, 0], torch.finfo(dtype).eps
    assert (chosen >= rows.amax(1) - 2 * spacing * rows.amax(1).abs()).all()
    assert ((value - chosen).abs() <= 2 * spacing * chosen.abs()).all()
    assert (index == rows.argmax(-1)).float().mean() > 0.5, "most rows have no near tie"
    for count in ROWS:
        got = best(x[:count].contiguous(), packed)
        assert torch.equal(got[1], index[:count]) and torch.equal(got[0], value[:count]), count


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_tile_with_every_group(dtype, group):
    """All tiles give the same bits, with packed instructions and without; float64 is the oracle."""
    packed, x = head(5000, 1024, dtype, group), tensor(65, 1024, dtype, 1)
    want = None
    for tile in TILES:
        for ptx in (True, False):
            for first, last in ((0, 65), (64, 65), (3, 11)):
                value = torch.full((last - first,), float("nan"), device="cuda")
                index = torch.full((last - first,), -1, device="cuda")
                some = x[first:last].contiguous()
                parts = int4_argmax.parts_of(packed)
                int4_argmax.launch(some, packed, value, index, parts, tile, ptx)
                if want is None:
                    want = value, index
                    check_near(x, packed, value, index)
                assert torch.equal(value, want[0][first:last]), tile
                assert torch.equal(index, want[1][first:last]), tile


def test_exact_sums_give_the_reference_s_answer():
    """Small integers, of which every sum is exact in any order: ties and all."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (256, 300), generator=generator, dtype=torch.uint8)
    q[:, 200:] = q[:, :100]
    scale = torch.full((2, 300), 0.5)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randint(-4, 5, (70, 256), generator=generator).to(dtype)
        want = draft.int4_argmax(x, q, scale, 128)
        packed = pack_words(
            lambda a, b: q[a:b].cuda(), 256, 300, scale.cuda(), None, 128, dtype
        )  # fmt: skip
        value, index = best(x.cuda(), packed)
        assert torch.equal(value.cpu(), want[0]) and torch.equal(index.cpu(), want[1])


def test_nan_infinity_and_padding():
    packed, x = head(1000, 512, torch.float16), tensor(5, 512, torch.float16, 1)
    x[0] = -x[0].abs()
    packed.scale[:, 1000:] = float("inf")
    first = best(x, packed)[1]
    assert (first < 1000).all(), "columns that only fill the last tile"
    packed.scale[0, first] = packed.scale[0, 700] = float("nan")
    value, index = best(x, packed)
    assert (index != first).all() and (index != 700).all(), "a NaN is minus infinity"
    want = logits(x, packed).nan_to_num(float("-inf")).amax(1)
    assert ((value - want).abs() <= 2e-3 * want.abs()).all()
    x[2, 3] = float("inf")
    value, index = best(x, packed)
    assert (value[2], index[2]) == (float("-inf"), 0) and value[[0, 1, 3, 4]].isfinite().all()
    x[2, 3] = 0
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
            assert torch.equal(index, best(static, packed)[1])


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
        want = best(x, packed)[1]
        for bound, _ in tiles.plan(int4_argmax.OP, family, columns, depth, depth // 128).tiles:
            count = min(bound, 64)
            assert torch.equal(best(x[:count].contiguous(), packed)[1], want[:count])
