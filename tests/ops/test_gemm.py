"""The GPU op's checks, its table and its choices, on a machine without a GPU."""

import pytest
import torch

from vllm_b70.ops import gemm, split, tiles


def half(*shape):
    return torch.zeros(*shape, dtype=torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 256)}, "bfloat16 or float16"),
        ({"x": half(256)}, r"x must be \[M, K\]"),
        ({"weight": half(64, 255)}, r"weight must be torch.float16 \[N, 256\]"),
        ({"weight": torch.zeros(64, 256, dtype=torch.bfloat16)}, "weight must be torch.float16"),
        ({"weight": half(256, 64).t()}, "contiguous"),
        ({"bias": half(63)}, r"bias must be \[64\]"),
    ],
)
def test_bad_arguments(change, message):
    given = {"x": half(2, 256), "weight": half(64, 256), "bias": None} | change
    with pytest.raises(ValueError, match=message):
        gemm.gemm(**given, done=torch.zeros(gemm.counters(64), dtype=torch.int32), parts=1)
    with pytest.raises(ValueError, match=message):
        gemm.gemm_argmax(**given, parts=1)


@pytest.mark.parametrize("bk", [48, 256])
def test_a_step_that_crosses_the_border_of_a_part_is_refused(bk):
    x, weight = torch.zeros(1, 512), torch.zeros(64, 512)
    done, out = torch.zeros(64, dtype=torch.int32), torch.zeros(1, 64)
    with pytest.raises(ValueError, match=f"a step of {bk} values of k"):
        gemm.launch(x, weight, None, done, out, 1, tiles.Tile("walk", 64, 16, 4, 3, bk))


def test_no_rows():
    done = torch.zeros(gemm.counters(64), dtype=torch.int32)
    assert gemm.gemm(half(0, 256), half(64, 256), None, done, 0).shape == (0, 64)
    value, index = gemm.gemm_argmax(half(0, 256), half(64, 256), None, 0)
    assert value.shape == index.shape == (0,) and index.dtype == torch.int64


@pytest.mark.parametrize("family", ["cuda-sm90", "cuda-sm120", "xpu", "cpu"])
@pytest.mark.parametrize(
    "shape", [(248320, 4096), (12288, 4096), (4096, 4096), (64, 4096), (1000, 640), (33, 100)]
)
def test_every_device_and_shape_has_a_plan(family, shape):
    units = -(-shape[1] // gemm.UNIT)
    plan = tiles.plan(gemm.OP, family, *shape, units)
    assert 1 <= plan.parts <= units
    bounds = [bound for bound, _ in plan.tiles]
    assert bounds == sorted(bounds)
    for rows in (1, 16, 17, 300, 16384):
        tile = plan.tile(rows)
        assert tile.kernel in ("split", "walk") or family == "cuda-sm90"
        assert gemm.UNIT % tile.bk == 0
        assert tile.bn >= gemm.LEAST_BN and tile.bm >= gemm.LEAST_BM


@pytest.mark.parametrize("columns", [33, 4096, 248320])
def test_the_counters_suffice_for_every_split_inside_the_workspace(columns):
    """As many rows as two parts leave room for, in the smallest tiles."""
    rows = split.WORKSPACE // (4 * 2 * columns)
    needed = -(-columns // gemm.LEAST_BN) * -(-rows // gemm.LEAST_BM)
    assert gemm.counters(columns) >= needed


def test_a_split_that_would_exceed_the_workspace_walks(monkeypatch):
    chosen = []
    monkeypatch.setattr(gemm, "launch", lambda *a: chosen.append(a[-1].kernel))
    plan = tiles.Plan(2, ((1024, tiles.Tile("split", 64, 64, 4, 3, 64)),))
    monkeypatch.setattr(gemm, "plan", lambda *a: plan)
    monkeypatch.setattr(split, "WORKSPACE", 4 * 2 * 64 * 100)
    for rows in (100, 101):
        done = torch.zeros(1, dtype=torch.int32)
        gemm.gemm(half(rows, 128), half(64, 128), None, done, 0)
    assert chosen == ["split", "walk"]


def test_the_fakes_give_the_ops_shapes():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x, w = half(3, 256), half(64, 256)
        done = torch.zeros(8, dtype=torch.int32)
        y = torch.ops.vllm_b70.gemm(x, w, None, done, 0)
        value, index = torch.ops.vllm_b70.gemm_argmax(x, w, None, 0)
    assert y.shape == (3, 64) and y.dtype == torch.float16
    assert (value.dtype, index.dtype) == (torch.float32, torch.int64)
    assert value.shape == index.shape == (3,)


@pytest.mark.parametrize(
    ("kind", "capability", "possible"),
    [("cuda", (9, 0), True), ("cuda", (8, 9), False), ("xpu", None, False), ("cpu", None, False)],
)
def test_launches_overlap_where_the_device_can(kind, capability, possible, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    # Not through the cache, which outlives this test.
    options = tiles.overlap_options.__wrapped__(torch.device(kind))
    assert options == ({"PDL": True, "launch_pdl": True} if possible else {"PDL": False})


@pytest.mark.parametrize(
    ("tile", "depth", "columns"),
    [(tiles.Tile("wide", 128, 32, 8, 3, 64, tensor=True), 256, 300),
     (tiles.Tile("wide", 128, 32, 8, 3, 64), 256, 300),
     (tiles.Tile("wide", 128, 32, 8, 3, 64, tensor=True), 250, 300)],
)  # fmt: skip
def test_a_wide_tile_walks_where_operands_cannot_be_described(tile, depth, columns, monkeypatch):
    from vllm_b70.kernels import linear, linear_wide

    grids = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *a, **k: grids.append((self.name, grid))

    monkeypatch.setattr(linear, "walk", Kernel("walk"))
    monkeypatch.setattr(linear_wide, "walk", Kernel("wide"))
    out = half(40, columns)
    gemm.launch(half(40, depth), half(columns, depth), None, out, out, 1, tile)
    described = tile.tensor and depth % 8 == 0
    assert grids == [("wide", (2 * 2,)) if described else ("walk", (2 * 3,))]
