"""The 16-bit GEMM on a GPU: one set of bits for every row count, tier, tile and capture."""

import pytest
import torch

from vllm_b70.ops import gemm as ops
from vllm_b70.ops import split, tiles
from vllm_b70.ops.tiles import Tile
from vllm_b70.reference import linear as reference

SHAPES = [  # columns, depth; the models', their two-card shards, and odd ones
    (248320, 4096),
    (12288, 4096),
    (4096, 4096),
    (6144, 4096),
    (4096, 2048),
    (64, 4096),
    (5120, 6144),
    (4096, 8192),
    (1000, 520),
    (70, 192),
    (65, 4160),
    (33, 1001),
]
ROWS = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 511, 1000, 2048]
TILES = [
    Tile("split", 16, 16, 2, 5, bk=128),
    Tile("split", 64, 16, 4, 3, bk=128),
    Tile("split", 64, 16, 4, 3, bk=64, swap=True, tensor=True),
    Tile("split", 64, 8, 4, 3, bk=128, swap=True),
    Tile("walk", 64, 64, 4, 3, bk=64),
    Tile("walk", 128, 128, 8, 3, bk=64, tensor=True, persistent=True),
    Tile("walk", 256, 128, 8, 3, bk=64, tensor=True),
    Tile("walk", 128, 64, 4, 3, bk=32, swap=True, tensor=True, persistent=True),
    Tile("wide", 128, 128, 8, 4, bk=64, tensor=True),
]


class Weight:
    """A random weight and what its product needs."""

    def __init__(self, columns, depth, dtype, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.w = torch.randn(columns, depth, device="cuda", generator=generator).to(dtype)
        self.bias = torch.randn(columns, device="cuda", generator=generator).to(dtype)
        self.done = torch.zeros(ops.counters(columns), dtype=torch.int32, device="cuda")

    def __call__(self, x, bias=None):
        return ops.gemm(x, self.w, bias, self.done, 0)

    def tile(self, x, tile, parts):
        out = torch.empty(x.shape[0], self.w.shape[0], dtype=x.dtype, device="cuda")
        ops.launch(x, self.w, None, self.done, out, parts, tile)
        return out


def rows(count, depth, dtype, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, depth, device="cuda", generator=generator).to(dtype)


def differing(a, b):
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_c1_row_counts(shape, dtype):
    weight = Weight(*shape, dtype)
    x = rows(2048, shape[1], dtype)
    full = weight(x)
    assert not full.isnan().any()
    for count in ROWS:
        assert differing(weight(x[:count].contiguous()), full[:count]) == 0, f"{count} rows"
    assert not weight.done.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_all_tiles(parts, dtype):
    weight = Weight(4096, 4096, dtype)
    x = rows(300, 4096, dtype)
    want = weight.tile(x, TILES[4], parts)
    for tile in TILES:
        for count in (1, 16, 300):
            got = weight.tile(x[:count].contiguous(), tile, parts)
            assert differing(got, want[:count]) == 0, f"{tile} {count}"


def test_another_partition_gives_other_bits():
    weight = Weight(4096, 4096, torch.float16)
    x = rows(16, 4096, torch.float16)
    assert differing(weight.tile(x, TILES[1], 1), weight.tile(x, TILES[1], 3)) > 0


def test_sixteen_thousand_rows():
    weight = Weight(12288, 4096, torch.float16)
    x = rows(16384, 4096, torch.float16)
    full = weight(x)
    for first in (0, 5000, 16383):
        assert differing(weight(x[first : first + 1]), full[first : first + 1]) == 0


def test_permutation_padding_and_poisoned_neighbours():
    weight = Weight(4096, 4096, torch.float16)
    x = rows(257, 4096, torch.float16)
    want = weight(x)
    order = torch.randperm(257, device="cuda")
    assert differing(weight(x[order]), want[order]) == 0
    poisoned = torch.full((800, 4096), float("nan"), dtype=torch.float16, device="cuda")
    poisoned[1::2] = float("inf")
    poisoned[100:357] = x
    assert differing(weight(poisoned)[100:357], want) == 0


@pytest.mark.parametrize("shape", [(4096, 4096), (64, 4096), (12288, 4096)], ids=str)
def test_stale_workspace_two_runs_and_capture(shape):
    weight = Weight(*shape, torch.float16)
    for count in (1, 8, 48, 600):
        x = rows(count, shape[1], torch.float16)
        want = weight(x)
        # What the allocator hands out next as workspace holds NaN.
        stale = torch.full((split.WORKSPACE // 4,), float("nan"), device="cuda")
        del stale
        assert differing(weight(x), want) == 0
        static = torch.zeros_like(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = weight(static)
            best = ops.gemm_argmax(static, weight.w, None, 0)[1]
        for seed in (1, 2, 1):
            fresh = rows(count, shape[1], torch.float16, seed)
            static.copy_(fresh)
            graph.replay()
            want = weight(fresh)
            assert differing(out, want) == 0
            assert torch.equal(best, want.float().argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_error_against_float64(shape, dtype):
    weight = Weight(*shape, dtype)
    x = rows(64, shape[1], dtype)
    exact = x.double() @ weight.w.double().t() + weight.bias.double()
    ours = (weight(x, weight.bias).double() - exact).abs().max()
    theirs = torch.nn.functional.linear(x, weight.w, weight.bias).double()
    assert ours <= 2 * (theirs - exact).abs().max()


def test_overflow_is_infinity():
    weight = Weight(4096, 4096, torch.float16)
    x = torch.full((3, 4096), 6e4, dtype=torch.float16, device="cuda")
    dense = x.double() @ weight.w.double().t()
    got = weight(x)
    large = dense.abs() > 1e5
    assert large.any() and got[large].isinf().all() and not got.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(248320, 4096), (124160, 4096), (1000, 520)], ids=str)
def test_argmax_is_that_of_the_logits(shape, dtype):
    """torch's argmax over the logits is the oracle: ties to the lowest, NaN as minus infinity."""
    weight = Weight(*shape, dtype)
    # Few distinct columns, so that every row has ties in many tiles.
    weight.w[shape[0] // 3 :] = weight.w[: shape[0] - shape[0] // 3].clone()
    x = rows(300, shape[1], dtype)
    logits = weight(x)
    want = logits.float().argmax(-1)
    assert (want < shape[0] // 3).any()
    for count in (1, 3, 16, 17, 64, 300):
        value, index = ops.gemm_argmax(x[:count].contiguous(), weight.w, None, 0)
        assert torch.equal(index, want[:count]), f"{count} rows"
        assert torch.equal(value, logits.float().amax(-1)[:count])
    bias = torch.zeros(shape[0], dtype=dtype, device="cuda")
    bias[want[:5]] = bias[shape[0] // 2] = float("nan")
    rest = reference.best(weight(x[:5], bias))
    value, index = ops.gemm_argmax(x[:5].contiguous(), weight.w, bias, 0)
    assert torch.equal(index, rest[1]) and torch.equal(value, rest[0])
    assert (index != want[:5]).all()
    bias.fill_(float("nan"))
    value, index = ops.gemm_argmax(x[:5].contiguous(), weight.w, bias, 0)
    assert (index == 0).all() and (value == float("-inf")).all()


def test_argmax_shards_combine_exactly():
    weight = Weight(24832, 4096, torch.float16)
    weight.w[20000] = weight.w[300]
    x = torch.cat([rows(60, 4096, torch.float16), weight.w[300:301] * 4])
    value, index = ops.gemm_argmax(x, weight.w, None, 1)
    shards = [ops.gemm_argmax(x, w.contiguous(), None, 1) for w in weight.w.chunk(2)]
    values = torch.stack([v for v, _ in shards])
    best = values.argmax(0)
    columns = torch.stack([i + 12416 * s for s, (_, i) in enumerate(shards)])
    assert index[-1] == 300
    assert torch.equal(columns.gather(0, best[None])[0], index)
    assert torch.equal(values.amax(0), value)


def test_compiled_with_any_row_count():
    weight = Weight(4096, 4096, torch.float16)

    def layer(x):
        return torch.ops.vllm_b70.gemm(x, weight.w, None, weight.done, 0)

    compiled = torch.compile(layer, backend="eager", dynamic=True, fullgraph=True)
    for count in (1, 2, 65):
        x = rows(count, 4096, torch.float16)
        assert differing(compiled(x), weight(x)) == 0


def test_every_table_entry_launches():
    """A tile that a device cannot hold would only be found by the row count that picks it."""
    entries = tiles._table(ops.OP).get(tiles.family(torch.device("cuda")), {})
    shapes = {tuple(map(int, name.split("x"))) for name in entries if name != "default"}
    for columns, depth in sorted(shapes | set(SHAPES)):
        weight = Weight(columns, depth, torch.float16)
        x = rows(4096, depth, torch.float16)
        one = torch.cat([weight(x[i : i + 1]) for i in range(16)])
        for bound, _ in ops.plan(torch.device("cuda"), columns, depth).tiles:
            got = weight(x[:bound])
            assert differing(got[:16], one) == 0, f"{columns}x{depth} at {bound} rows"
