"""The INT4 GEMM on a GPU: one set of bits for every row count, tier, tile and capture."""

import pytest
import torch

from vllm_b70.ops import hopper, int4_gemm, split, tiles
from vllm_b70.ops.int4_gemm import apply, counters, launch
from vllm_b70.ops.int4_words import pack_words, unpack_words
from vllm_b70.ops.tiles import Tile

SHAPES = [  # columns, depth, group size; the models', their two-card shards, and odd ones
    (24576, 4096, 128),
    (4096, 12288, 128),
    (10240, 4096, 128),
    (4096, 4096, 128),
    (12288, 4096, 128),
    (4096, 6144, 128),
    (34816, 5120, 128),
    (5120, 17408, 128),
    (1000, 4096, 32),
    (70, 384, 64),
    (33, 1000, 1000),
]
ROWS = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 511, 1000, 2048]
TILES = [
    Tile("split", 64, 16, 4, 3),
    Tile("split", 128, 16, 8, 3),
    Tile("split", 64, 64, 4, 3),
    Tile("walk", 64, 32, 4, 3),
    Tile("walk", 64, 64, 4, 3),
    Tile("walk", 64, 128, 4, 2),
    Tile("walk", 128, 128, 8, 3),
    Tile("walk", 64, 256, 8, 2),
]
HOPPER = [
    Tile("hopper", hopper.BN, bm, 8, 3, cut=cut)
    for bm in hopper.BM
    for cut in ("", "tiles", "parts")
]
name = "{0.bm} rows {0.cut}".format
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not hopper.available(torch.device("cuda")),
    reason="no Hopper, or a Triton that was not tried there",
)


class Weight:
    """A random weight and what its exact product needs."""

    def __init__(self, columns, depth, group_size, dtype, symmetric=True, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)
        groups = depth // group_size
        scale = torch.rand(groups, columns, device="cuda", generator=generator) * 0.02
        self.zero = None
        if not symmetric:
            self.zero = torch.randint(0, 16, (groups, columns), device="cuda", generator=generator)
        self.packed = pack_words(
            lambda a, b: torch.randint(0, 16, (b - a, columns), device="cuda", generator=generator),
            depth, columns, scale.to(dtype), self.zero, group_size, dtype,
        )  # fmt: skip
        self.done = torch.zeros(counters(columns), dtype=torch.int32, device="cuda")
        self.bias = torch.randn(columns, device="cuda", generator=generator).to(dtype)
        self.group_size, self.columns, self.depth, self.dtype = group_size, columns, depth, dtype

    def __call__(self, x, bias=None):
        return apply(x, self.packed, bias, self.done, 0)

    def tile(self, x, tile, parts, ptx=True, bias=None, out=None):
        if out is None:
            out = torch.empty(x.shape[0], self.columns, dtype=x.dtype, device="cuda")
        w = self.packed
        launch(x, w.words, w.scale, w.offset, bias, self.done, out, w.group, parts, tile, ptx)
        return out

    def dense(self):
        """[K, N] float64."""
        q = unpack_words(self.packed).double()
        zero = (
            8.0 if self.zero is None else self.zero.double().repeat_interleave(self.group_size, 0)
        )
        scale = self.packed.scale[:, : self.columns].double()
        return (q - zero) * scale.repeat_interleave(self.packed.group, 0)[: self.depth]


def rows(count, depth, dtype, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, depth, device="cuda", generator=generator).to(dtype)


def differing(a, b):
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_c1_row_counts(shape, dtype):
    weight = Weight(*shape, dtype, symmetric=shape[0] % 2 == 0)
    x = rows(2048, shape[1], dtype)
    full = weight(x)
    assert not full.isnan().any()
    for count in ROWS:
        assert differing(weight(x[:count].contiguous()), full[:count]) == 0, f"{count} rows"
    assert not weight.done.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_all_tiles_and_both_unpackings(parts, dtype):
    candidates = TILES + (HOPPER if hopper.available(torch.device("cuda")) else [])
    weight = Weight(4096, 4096, 128, dtype, symmetric=False)
    x = rows(300, 4096, dtype)
    want = weight.tile(x, TILES[-1], parts)
    for tile in candidates:
        for count in (1, 16, 300):
            got = weight.tile(x[:count].contiguous(), tile, parts)
            assert differing(got, want[:count]) == 0, f"{tile} {count}"
    for tile in (TILES[0], TILES[6]):
        assert differing(weight.tile(x, tile, parts, ptx=False), want) == 0, "plain Triton"


@on_hopper
@pytest.mark.parametrize("tile", HOPPER, ids=name)
@pytest.mark.parametrize(
    ("columns", "depth", "parts", "kind"),
    [
        (24576, 4096, 2, "fp16"), (4096, 12288, 8, "fp16"), (10240, 4096, 3, "fp16"),
        (4096, 4096, 4, "fp16"), (34816, 5120, 3, "fp16"), (5120, 17408, 8, "fp16"),
        # Columns that no tile divides; 4168 is no multiple of 16 either.
        (4168, 4096, 2, "fp16"), (4168, 4096, 2, "fp16 asymmetric bias"),
        (4168, 4096, 2, "bf16 asymmetric bias"), (4160, 4096, 3, "bf16 asymmetric bias"),
        # One part, and as many as there may be.
        (4096, 4096, 1, "bf16"), (70, 2048, 8, "fp16 asymmetric"),
    ],
)  # fmt: skip
def test_the_hopper_kernel_is_the_walk(columns, depth, parts, kind, tile):
    """Launched again and again, because a race need not show at once; between rows that are NaN,
    into an output amid marked rows."""
    dtype = torch.float16 if "fp16" in kind else torch.bfloat16
    weight = Weight(columns, depth, 128, dtype, symmetric="asymmetric" not in kind)
    bias = weight.bias if "bias" in kind else None
    full = rows(2048, depth, dtype)
    want = weight.tile(full, TILES[4], parts, bias=bias).view(torch.int16)
    around = torch.empty(128 + 2048 + 128, depth, dtype=dtype, device="cuda")
    result = torch.empty(128 + 2048 + 128, columns, dtype=torch.int16, device="cuda")
    mark = 0x7ABC  # in fp16 a NaN that no arithmetic makes, in bf16 larger than any sum here
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    for count in (1, 63, 64, 65, 127, 128, 129, 200, 256, 300, 1000, 1024, 2048):
        around.fill_(float("nan"))
        x, inside = around[128 : 128 + count], result[128 : 128 + count]
        x.copy_(full[:count])
        for _ in range(4):
            result.fill_(mark)
            # What the allocator hands out next as workspace holds NaN.
            stale = torch.full((split.WORKSPACE // 4,), float("nan"), device="cuda")
            del stale
            weight.tile(x, tile, parts, bias=bias, out=inside.view(dtype))
            wrong[0] += (inside != want[:count]).sum()
            wrong[1] += (result != mark).sum() - (inside != mark).sum()
        assert wrong.tolist() == [0, 0], f"{count} rows: elements that differ, written outside"
        assert not weight.done.any()


@on_hopper
@pytest.mark.parametrize("tile", HOPPER, ids=name)
def test_the_hopper_kernel_many_times(tile):
    """More tiles than multiprocessors and an odd number of groups a part: slots of the ring and
    phases of its barriers are used in all combinations."""
    weight = Weight(10240, 4096 - 128, 128, torch.float16)
    x = rows(1000, weight.depth, torch.float16)
    want = weight.tile(x, TILES[4], 3)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        different += (weight.tile(x, tile, 3).view(torch.int16) != want.view(torch.int16)).sum()
    assert int(different) == 0
    assert not weight.done.any()


@on_hopper
def test_what_the_hopper_kernel_cannot_read_is_walked():
    """A row that begins off a 16-byte border, where TMA does not go: the same bits."""
    weight = Weight(4096, 4096, 128, torch.float16)
    x = rows(300, 4096, torch.float16)
    plan = tiles.plan(int4_gemm.OP, "cuda-sm90", 4096, 4096, 32)
    assert plan.tile(300).kernel == "hopper"
    shifted = torch.empty(300 * 4096 + 1, dtype=torch.float16, device="cuda")[1:].view(300, 4096)
    shifted.copy_(x)
    assert differing(weight(shifted), weight(x)) == 0


@on_hopper
@pytest.mark.parametrize("tile", HOPPER, ids=name)
def test_the_hopper_kernel_in_a_graph(tile):
    weight = Weight(4096, 4096, 128, torch.float16)
    static = rows(200, 4096, torch.float16)
    weight.tile(static, tile, 4)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = weight.tile(static, tile, 4)
    for seed in (1, 2, 1):
        fresh = rows(200, 4096, torch.float16, seed)
        static.copy_(fresh)
        graph.replay()
        assert differing(out, weight.tile(fresh, TILES[4], 4)) == 0
        assert not weight.done.any()


def test_sixteen_thousand_rows():
    weight = Weight(10240, 4096, 128, torch.float16)
    x = rows(16384, 4096, torch.float16)
    full = weight(x)
    for first in (0, 5000, 16383):
        assert differing(weight(x[first : first + 1]), full[first : first + 1]) == 0


def test_permutation_padding_and_poisoned_neighbours():
    weight = Weight(4096, 4096, 128, torch.float16)
    x = rows(257, 4096, torch.float16)
    want = weight(x)
    order = torch.randperm(257, device="cuda")
    assert differing(weight(x[order]), want[order]) == 0
    poisoned = torch.full((800, 4096), float("nan"), dtype=torch.float16, device="cuda")
    poisoned[1::2] = float("inf")
    poisoned[100:357] = x
    assert differing(weight(poisoned)[100:357], want) == 0


def test_stale_workspace_two_runs_and_capture():
    weight = Weight(4096, 12288, 128, torch.float16)
    for count in (1, 8, 48, 200, 600):
        x = rows(count, 12288, torch.float16)
        want = weight(x)
        # What the allocator hands out next as workspace holds NaN.
        stale = torch.full((split.WORKSPACE // 4,), float("nan"), device="cuda")
        del stale
        assert differing(weight(x), want) == 0
        static = torch.zeros_like(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = weight(static)
        for seed in (1, 2, 1):
            fresh = rows(count, 12288, torch.float16, seed)
            static.copy_(fresh)
            graph.replay()
            assert differing(out, weight(fresh)) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES[1:4] + SHAPES[8:], ids=str)
def test_error_against_float64(shape, dtype):
    weight = Weight(*shape, dtype, symmetric=False)
    x = rows(64, shape[1], dtype)
    dense = weight.dense()
    exact = x.double() @ dense + weight.bias.double()
    ours = (weight(x, weight.bias).double() - exact).abs().max()
    theirs = torch.nn.functional.linear(x, dense.t().to(dtype), weight.bias).double()
    assert ours <= 2 * (theirs - exact).abs().max()


def test_overflow_is_infinity():
    weight = Weight(4096, 4096, 128, torch.float16)
    x = torch.full((3, 4096), 6e4, dtype=torch.float16, device="cuda")
    dense = x.double() @ weight.dense()
    got = weight(x)
    large = dense.abs() > 1e5
    assert large.any() and got[large].isinf().all() and not got.isnan().any()


def test_compiled_with_any_row_count():
    weight = Weight(4096, 4096, 128, torch.float16)
    w = weight.packed

    def layer(x):
        return torch.ops.vllm_b70.int4_gemm(
            x, w.words, w.scale, w.offset, None, weight.done, w.columns, w.group, 0
        )

    compiled = torch.compile(layer, backend="eager", dynamic=True, fullgraph=True)
    for count in (1, 2, 65):
        x = rows(count, 4096, torch.float16)
        assert differing(compiled(x), weight(x)) == 0


def test_every_table_entry_stays_inside_the_workspace():
    family = tiles.family(torch.device("cuda"))
    for columns, depth, _ in SHAPES:
        plan = tiles.plan(int4_gemm.OP, family, columns, depth, depth // 128)
        for bound, tile in plan.tiles:
            if tile.kernel == "split" and plan.parts > 1:
                rows_here = min(bound, 2048)
                fits = 4 * plan.parts * rows_here * columns <= split.WORKSPACE
                assert fits or bound > 256, f"{columns}x{depth}: {tile} at {bound} rows walks"
