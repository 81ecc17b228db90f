"""The 16-bit kernels in the interpreter: every tier and tile equals the reference, bit for bit."""

import pytest
import torch

from vllm_b70.ops import gemm as ops
from vllm_b70.ops import split
from vllm_b70.ops.tiles import Tile
from vllm_b70.reference import linear as reference

TILES = [
    Tile("split", 64, 16, 4, 3, bk=128),
    Tile("split", 64, 8, 4, 3, bk=64, swap=True),
    Tile("split", 32, 16, 4, 3, bk=64, tensor=True),
    Tile("walk", 64, 32, 4, 3, bk=64),
    Tile("walk", 128, 16, 8, 3, bk=32, swap=True, persistent=True),
    Tile("walk", 64, 64, 8, 3, bk=64, tensor=True, persistent=True),
    Tile("wide", 64, 32, 8, 3, bk=64, tensor=True),
]


def name(tile):
    flags = [f for f in ("swap", "tensor", "persistent") if getattr(tile, f)]
    return "-".join([f"{tile.kernel}{tile.bn}x{tile.bm}x{tile.bk}", *flags])


def tensor(*shape, dtype=torch.float16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(x, weight, bias, parts, tile):
    columns = weight.shape[0]
    out = torch.full((x.shape[0], columns), float("nan"), dtype=x.dtype)
    done = torch.zeros(ops.counters(columns), dtype=torch.int32)
    ops.launch(x, weight, bias, done, out, parts, tile)
    assert not done.any(), "the counters are left as they were found"
    return out


def run_argmax(x, weight, bias, parts, tile):
    value = torch.full((x.shape[0],), float("nan"))
    index = torch.full((x.shape[0],), -1)
    ops.launch_argmax(x, weight, bias, value, index, parts, tile)
    return value, index


@pytest.mark.parametrize("tile", TILES, ids=name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("depth", "columns", "parts"),
    [
        (256, 64, 1),
        (512, 72, 3),
        (200, 130, 2),
        (99, 65, 1),
        (192, 72, 1),
        (320, 65, 2),
        (96, 64, 1),
    ],
)
def test_equals_the_reference(depth, columns, parts, dtype, tile):
    x, weight = tensor(9, depth, dtype=dtype), tensor(columns, depth, dtype=dtype, seed=1)
    bias = tensor(columns, dtype=dtype, seed=2)
    want = reference.linear(x, weight, bias, parts)
    assert torch.equal(run(x, weight, bias, parts, tile), want)
    value, index = run_argmax(x, weight, bias, parts, tile)
    assert torch.equal(index, want.float().argmax(1))
    assert torch.equal(value, want.float().amax(1))


@pytest.mark.parametrize("parts", [1, 3])
def test_c1_rows_tiles_and_neighbours(parts):
    x, weight = tensor(40, 384), tensor(64, 384, seed=1)
    whole = run(x, weight, None, parts, TILES[0])
    for i in (0, 1, 7, 15, 16, 31, 32, 39):
        assert torch.equal(run(x[i : i + 1], weight, None, parts, TILES[0]), whole[i : i + 1])
    for count in (2, 15, 16, 17, 33):
        for tile in TILES:
            assert torch.equal(run(x[:count], weight, None, parts, tile), whole[:count])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(run(x[order].contiguous(), weight, None, parts, TILES[3]), whole[order])
    poisoned = torch.full((64, 384), float("nan"), dtype=torch.float16)
    poisoned[1::2] = float("inf")
    poisoned[3:43] = x
    for tile in TILES:
        assert torch.equal(run(poisoned, weight, None, parts, tile)[3:43], whole)


def test_the_partition_is_part_of_the_arithmetic():
    """Were it not, equality over the tiers would show nothing about it."""
    x, weight = tensor(16, 1024), tensor(64, 1024, seed=1)
    one, four = (run(x, weight, None, parts, TILES[0]) for parts in (1, 4))
    assert not torch.equal(one, four)


@pytest.mark.parametrize("tile", [TILES[0], TILES[1], TILES[5]], ids=name)
def test_argmax_ties_nan_and_infinity(tile):
    """Equal columns tie across every border of tiles; the lowest wins."""
    weight = tensor(200, 128, seed=1) * 0.01
    best = tensor(128, seed=3)
    for column in (70, 63, 64, 199, 15, 16):
        weight[column] = best
    x = torch.stack([best, best, -best, best, best, best * 0])
    bias = torch.zeros(200, dtype=torch.float16)
    _, index = run_argmax(x, weight, bias, 1, tile)
    assert index.tolist()[:2] == [15, 15] and index[5] == 0
    lower = bias.clone()
    lower[15] = lower[63] = -1.0
    assert run_argmax(x, weight, lower, 1, tile)[1][0] == 16
    nan = bias.clone()
    nan[15] = nan[130] = float("nan")
    assert run_argmax(x, weight, nan, 1, tile)[1].tolist()[:2] == [16, 16]
    nan[3] = float("inf")
    value, index = run_argmax(x, weight, nan, 1, tile)
    assert (value == float("inf")).all() and index.tolist() == [3] * 6
    value, index = run_argmax(x, weight, torch.full_like(bias, float("nan")), 1, tile)
    assert (value == float("-inf")).all() and index.tolist() == [0] * 6
    infinite = torch.full_like(bias, float("-inf"))
    value, index = run_argmax(x, weight, infinite, 1, tile)
    assert (value == float("-inf")).all() and index.tolist() == [0] * 6
    infinite[9] = infinite[11] = float("inf")
    value, index = run_argmax(x, weight, infinite, 1, tile)
    assert (value == float("inf")).all() and index.tolist() == [9] * 6


def test_argmax_compares_rounded_logits():
    """Two sums that differ in fp32 and round to one fp16 value tie, as in a row of logits."""
    weight = torch.zeros(64, 128, dtype=torch.float16)
    weight[20, 0], weight[40, :2] = 1.0, torch.tensor([1.0, 2**-13])
    x = torch.ones(1, 128, dtype=torch.float16)
    assert run_argmax(x, weight, None, 1, TILES[0])[1].item() == 20
    assert reference.linear_argmax(x, weight, None)[1].item() == 20


def test_argmax_signed_zeros_tie():
    weight = torch.zeros(64, 128, dtype=torch.float16)
    bias = torch.full((64,), -1.0, dtype=torch.float16)
    bias[7], bias[9] = -0.0, 0.0
    x = torch.zeros(1, 128, dtype=torch.float16)
    assert run_argmax(x, weight, bias, 1, TILES[0])[1].item() == 7


def test_argmax_of_shards_combines_exactly():
    x, weight = tensor(5, 256), tensor(192, 256, seed=1)
    weight[150] = weight[20]
    value, index = run_argmax(x, weight, None, 1, TILES[0])
    shards = [run_argmax(x, weight[i : i + 64], None, 1, TILES[0]) for i in (0, 64, 128)]
    values = torch.stack([v for v, _ in shards])
    assert torch.equal(values.amax(0), value)
    best = values.argmax(0)
    combined = torch.stack([i + 64 * s for s, (_, i) in enumerate(shards)]).gather(0, best[None])[0]
    assert torch.equal(combined, index)


def test_argmax_in_pieces(monkeypatch):
    """Many rows go in pieces that keep to the workspace."""
    x, weight = tensor(40, 128), tensor(130, 128, seed=1)
    want = run_argmax(x, weight, None, 1, TILES[0])
    monkeypatch.setattr(split, "WORKSPACE", 16 * 3 * 8)
    got = run_argmax(x, weight, None, 1, TILES[0])
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
