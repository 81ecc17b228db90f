"""The INT4 kernel in the interpreter: every tier and tile equals the reference, bit for bit."""

import pytest
import torch

from vllm_b70.ops import int4_argmax, split
from vllm_b70.ops.int4_gemm import counters, launch
from vllm_b70.ops.int4_words import Int4Words, pack_words
from vllm_b70.ops.tiles import Tile
from vllm_b70.reference import int4_draft
from vllm_b70.reference.int4_linear import int4_argmax as reference_argmax
from vllm_b70.reference.int4_linear import int4_linear as reference


class Weight:
    """A random weight in the kernel's form and in the reference's."""

    def __init__(self, depth, columns, group_size, symmetric, dtype, seed=0):
        generator = torch.Generator().manual_seed(seed)
        groups = depth // group_size
        self.q = torch.randint(0, 16, (depth, columns), generator=generator)
        self.scale = (torch.rand(groups, columns, generator=generator) * 0.1).to(dtype)
        self.zero = None
        if not symmetric:
            self.zero = torch.randint(0, 16, (groups, columns), generator=generator)
        self.packed = pack_words(
            lambda a, b: self.q[a:b], depth, columns, self.scale, self.zero, group_size, dtype
        )
        self.bias = torch.randn(columns, generator=generator).to(dtype)

    def run(self, x, tile, parts, bias=None, done=None):
        w = self.packed
        out = torch.full((x.shape[0], w.columns), float("nan"), dtype=x.dtype)
        done = torch.zeros(counters(w.columns), dtype=torch.int32) if done is None else done
        launch(x, w.words, w.scale, w.offset, bias, done, out, w.group, parts, tile, ptx=False)
        assert not done.any(), "the counters are left as they were found"
        return out

    def reference(self, x, parts, bias=None):
        """With one scale a column, the groups of the arithmetic are 128 values of k."""
        repeat = self.packed.words.shape[0] if self.scale.shape[0] == 1 else None
        scale, zero, q = self.scale, self.zero, self.q
        if repeat is not None:
            pad = repeat * self.packed.group - q.shape[0]
            scale = scale.expand(repeat, -1)
            zero = None if zero is None else zero.expand(repeat, -1)
            q = torch.nn.functional.pad(q, (0, 0, 0, pad))
            x = torch.nn.functional.pad(x, (0, pad))
        zero = None if zero is None else zero.to(torch.uint8)
        return reference(x, q.to(torch.uint8), scale, zero, bias, self.packed.group, parts)


def rows(count, depth, dtype, seed=1):
    return torch.randn(count, depth, generator=torch.Generator().manual_seed(seed)).to(dtype)


TILES = [
    Tile("split", 64, 16, 4, 2),
    Tile("split", 128, 8, 4, 2),
    Tile("walk", 64, 16, 4, 2),
    Tile("walk", 128, 32, 8, 3),
    # The rows as the left operand, as on an XPU: whole groups, and groups in steps.
    Tile("split", 128, 8, 4, 2, left=True, grf=256),
    Tile("walk", 64, 16, 4, 2, left=True, step=64),
]


@pytest.mark.parametrize(
    "tile",
    [TILES[0], TILES[3], TILES[4], TILES[5]],
    ids=lambda t: f"{t.kernel}{t.bn}x{t.bm}{'left' * t.left}",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("depth", "columns", "group_size", "parts"),
    [(256, 64, 128, 1), (384, 70, 128, 2), (256, 130, 32, 3), (192, 64, 64, 3), (99, 65, 99, 1)],
)
def test_equals_the_reference(depth, columns, group_size, parts, symmetric, dtype, tile):
    weight = Weight(depth, columns, group_size, symmetric, dtype)
    x = rows(9, depth, dtype)
    got = weight.run(x, tile, parts, weight.bias)
    assert torch.equal(got, weight.reference(x, parts, weight.bias))


@pytest.mark.parametrize("parts", [1, 3])
def test_c1_rows_tiles_and_neighbours(parts):
    weight = Weight(384, 64, 128, False, torch.float16)
    x = rows(40, 384, torch.float16)
    whole = weight.run(x, TILES[0], parts)
    for i in (0, 1, 7, 15, 16, 31, 32, 39):
        assert torch.equal(weight.run(x[i : i + 1], TILES[0], parts), whole[i : i + 1])
    for count in (2, 15, 16, 17, 33):
        for tile in TILES:
            assert torch.equal(weight.run(x[:count], tile, parts), whole[:count])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(weight.run(x[order].contiguous(), TILES[2], parts), whole[order])
    poisoned = torch.full((64, 384), float("nan"), dtype=torch.float16)
    poisoned[1::2] = float("inf")
    poisoned[3:43] = x
    for tile in TILES:
        assert torch.equal(weight.run(poisoned, tile, parts)[3:43], whole)


def test_block_loads_are_only_a_way_to_load():
    """A row that begins off a 64-byte border is loaded otherwise, and gives the same bits."""
    weight = Weight(384, 64, 128, True, torch.float16)
    x = rows(9, 384, torch.float16)
    moved = torch.empty(9 * 384 + 1, dtype=torch.float16)[1:].view(9, 384).copy_(x)
    assert x.data_ptr() % 64 == 0 and moved.data_ptr() % 64
    for tile in TILES[4:]:
        assert torch.equal(weight.run(moved, tile, 2), weight.run(x, tile, 2))


def test_the_partition_is_part_of_the_arithmetic():
    """Were it not, equality over the tiers would show nothing about it."""
    weight = Weight(1024, 64, 32, True, torch.float16)
    x = rows(16, 1024, torch.float16)
    assert not torch.equal(weight.run(x, TILES[0], 1), weight.run(x, TILES[0], 4))


def run_argmax(x, weight, tile, parts=1):
    value = torch.full((x.shape[0],), float("nan"))
    index = torch.full((x.shape[0],), -1)
    int4_argmax.launch(x, weight, value, index, parts, tile, ptx=False)
    return value, index


@pytest.mark.parametrize(
    "tile",
    [TILES[0], *TILES[2:4], Tile("walk", 64, 16, 4, 2, ahead=256), TILES[5]],
    ids=lambda t: f"{t.bn}x{t.bm}{'left' * t.left}",
)
@pytest.mark.parametrize(
    ("depth", "columns", "group_size", "parts", "dtype"),
    [
        (256, 64, 128, 1, torch.float16),
        (384, 200, 128, 2, torch.bfloat16),
        (256, 130, 32, 1, torch.bfloat16),
        (512, 70, 256, 3, torch.float16),
    ],
)
def test_argmax_is_that_of_the_reference(depth, columns, group_size, parts, dtype, tile):
    weight = Weight(depth, columns, group_size, True, dtype)
    x = rows(9, depth, dtype)
    scale = weight.scale.repeat_interleave(group_size // weight.packed.group, 0)
    q = weight.q.to(torch.uint8)
    group = weight.packed.group
    if tile.left:
        want = reference_argmax(x, q, scale, None, None, group, parts)
    else:
        want = int4_draft.int4_argmax(x, q, scale, group, parts)
    value, index = run_argmax(x, weight.packed, tile, parts)
    assert torch.equal(value, want[0]) and torch.equal(index, want[1])


def prepared(x, group):
    """What the kernel makes of x for the argmax, in the reference's form."""
    from vllm_b70.kernels import int4_draft as kernels

    (count, depth), groups = x.shape, x.shape[1] // group
    h, o, unit = torch.empty(count, depth).half(), torch.empty(groups, 64), torch.empty(count)
    padded = 1 << (groups - 1).bit_length()
    kernels.prepare[(count,)](
        x, h, o, unit, count, 64, depth, groups, GROUP=group, GROUPS=padded, PDL=False
    )
    return h, o[:, :count].t(), unit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("depth", "group"), [(384, 128), (64, 64), (160, 32)])
def test_a_draft_s_rows_are_prepared_as_the_reference_s(depth, group, dtype):
    """From the least values of a dtype to the largest; zeros, infinity and NaN."""
    # The interpreter takes a bfloat16 below the normal ones for zero.
    least, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    least = least / 4 if dtype == torch.float16 else least
    x = rows(9, depth, dtype)
    x[1] *= 1e-3
    x[2] = x[2].sign() * largest
    x[3] = x[3].sign() * least
    x[4, ::2] = least
    x[5] = 0
    x[6, 7], x[7, 9], x[8, 0] = float("inf"), float("nan"), largest
    want = int4_draft.prepare(x, group)
    for got, wanted in zip(prepared(x, group), want, strict=True):
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())
    h, offset, unit = want
    assert offset[6:8].isnan().all() and not offset[[*range(6), 8]].isnan().any()
    exact = [0, 1, 2, 3, 5]
    assert torch.equal(h.double()[exact] * unit.double()[exact, None], x.double()[exact])
    assert (h[[0, 1, 2, 8]].abs().amax(1) >= 2**14).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_draft_s_logits_are_as_good_as_the_model_s(dtype):
    """Against float64: no further from the exact logits than a rounding and a little."""
    weight, x = Weight(1024, 64, 128, True, dtype), rows(9, 1024, dtype)
    x[0, 5] = 300  # far larger than the others, as some values of hidden states are
    scale = weight.scale.double().repeat_interleave(128, 0)
    exact = x.double() @ ((weight.q.double() - 8) * scale)
    got = int4_draft.int4_draft(x, weight.q.to(torch.uint8), weight.scale, 128)
    spacing = torch.finfo(dtype).eps * exact.abs()
    most = x.double().abs().amax(1, keepdim=True) * scale.max()
    assert ((got.double() - exact).abs() <= 0.51 * spacing + 2e-3 * most).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_draft_depends_on_its_own_row_alone(dtype):
    """Whatever rows are beside it, however many, in whatever launch."""
    weight, x = Weight(256, 200, 128, True, dtype), rows(40, 256, dtype)
    x[3] *= 2.0**-14
    x[7, 1] = float("inf")
    value, index = run_argmax(x, weight.packed, TILES[0], 2)
    assert (value[7], index[7]) == (float("-inf"), 0) and value.isfinite().sum() == 39
    for tile in (TILES[0], TILES[3]):
        for first, last in ((0, 1), (3, 4), (7, 8), (2, 9), (5, 40)):
            got = run_argmax(x[first:last].contiguous(), weight.packed, tile, 2)
            assert torch.equal(got[0], value[first:last])
            assert torch.equal(got[1], index[first:last])


def test_a_draft_s_tile_has_16_rows():
    weight, x = Weight(256, 70, 128, True, torch.float16), rows(3, 256, torch.float16)
    with pytest.raises(ValueError, match="16 to 64 rows, not 8"):
        run_argmax(x, weight.packed, TILES[1])


def test_scales_off_a_border_of_pairs_are_copied():
    weight, x = Weight(256, 70, 128, True, torch.float16), rows(3, 256, torch.float16)
    w = weight.packed
    moved = torch.empty(w.scale.numel() + 1).half()[1:].view(w.scale.shape).copy_(w.scale)
    assert moved.data_ptr() % 4
    other = Int4Words(w.words, moved, None, w.depth, w.columns, w.group)
    for got, want in zip(run_argmax(x, other, TILES[0]), run_argmax(x, w, TILES[0]), strict=True):
        assert torch.equal(got, want)


def tied(columns=200, depth=128):
    """Columns 15, 16, 63, 64, 70 and 199 are one column, and the best for the rows here."""
    weight = Weight(depth, columns, 128, True, torch.float16)
    q, scale = weight.q.clone(), weight.scale.clone() * 0.01
    for column in (15, 16, 63, 64, 70, 199):
        q[:, column], scale[:, column] = q[:, 15], 0.1
    packed = pack_words(lambda a, b: q[a:b], depth, columns, scale, None, 128, torch.float16)
    return packed, (q[:, 15] - 8).to(torch.float16)[None]


@pytest.mark.parametrize("tile", [TILES[0], TILES[3], TILES[5]], ids=lambda t: f"{t.bn}x{t.bm}")
def test_argmax_ties_nan_and_infinity(tile):
    """Equal columns tie across every border of tiles; the lowest wins, and NaN never does."""
    packed, best = tied()
    x = torch.cat([best, -best, best, best * 0])
    value, index = run_argmax(x, packed, tile)
    assert index[0] == index[2] == 15 and index[3] == 0 and value[3] == 0
    assert index[1] not in (15, 16, 63, 64, 70, 199)
    packed.scale[0, 15] = packed.scale[0, 130] = float("nan")
    assert run_argmax(x, packed, tile)[1].tolist()[::2] == [16, 16]
    packed.scale[0, 70] = float("inf")
    value, index = run_argmax(x, packed, tile)
    assert index.tolist()[::2] == [70, 70] and (value[::2] == float("inf")).all()
    packed.scale[:] = float("nan")
    value, index = run_argmax(x, packed, tile)
    assert (value == float("-inf")).all() and index.tolist() == [0] * 4


def test_argmax_never_names_padding():
    """All logits are minus infinity, and the columns that fill the last tile would give zero."""
    x = torch.ones(2, 128, dtype=torch.float16)
    q = torch.zeros(128, 70, dtype=torch.uint8)
    scale = torch.full((1, 70), 6e4)
    packed = pack_words(lambda a, b: q[a:b], 128, 70, scale, None, 128, torch.float16)
    for tile in (TILES[0], TILES[3], TILES[5]):
        value, index = run_argmax(x, packed, tile)
        assert (value == float("-inf")).all() and index.tolist() == [0, 0]


def test_argmax_in_pieces_and_shards(monkeypatch):
    """Many rows go in pieces that keep to the workspace; shards combine by value and column."""
    weight = Weight(128, 192, 128, True, torch.float16)
    x = rows(40, 128, torch.float16)
    value, index = run_argmax(x, weight.packed, TILES[0])
    w = weight.packed
    shards = [
        Int4Words(w.words[:, a : a + 64].contiguous(), w.scale[:, a : a + 64].contiguous(), None,
                  128, 64, 128)
        for a in (0, 64, 128)
    ]  # fmt: skip
    values, indices = zip(*(run_argmax(x, shard, TILES[0]) for shard in shards), strict=True)
    best = torch.stack(values).argmax(0)
    columns = torch.stack([i + 64 * n for n, i in enumerate(indices)])
    assert torch.equal(columns.gather(0, best[None])[0], index)
    monkeypatch.setattr(split, "WORKSPACE", 16 * 3 * 8)
    assert torch.equal(run_argmax(x, w, TILES[0])[1], index)
