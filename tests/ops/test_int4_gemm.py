"""The GPU op's checks and its table, on a machine without a GPU."""

import pytest
import torch

from vllm_b70.ops import int4_gemm, tiles
from vllm_b70.ops.int4_words import pack_words


def arguments(**change):
    q = torch.randint(0, 16, (256, 64))
    packed = pack_words(lambda a, b: q[a:b], 256, 64, torch.rand(2, 64), None, 128, torch.float16)
    given = {
        "x": torch.zeros(2, 256, dtype=torch.float16),
        "words": packed.words,
        "scale": packed.scale,
        "offset": None,
        "bias": None,
        "done": torch.zeros(int4_gemm.counters(64), dtype=torch.int32),
        "columns": 64,
        "group": 128,
        "parts": 1,
    }
    return given | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 256)}, "bfloat16 or float16"),
        ({"x": torch.zeros(2, 255, dtype=torch.bfloat16)}, "scale must be torch.bfloat16"),
        ({"x": torch.zeros(2, 512, dtype=torch.float16)}, r"words must be int32 \(4, 64, 16\)"),
        ({"columns": 65}, r"words must be int32 \(2, 128, 16\)"),
        ({"offset": torch.zeros(2, 63, dtype=torch.int32)}, "offset must be int32"),
        ({"bias": torch.zeros(63)}, r"bias must be \[64\]"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        int4_gemm.int4_gemm(**arguments(**change))


def test_no_rows():
    empty = torch.zeros(0, 256, dtype=torch.float16)
    assert int4_gemm.int4_gemm(**arguments(x=empty)).shape == (0, 64)


@pytest.mark.parametrize("family", ["cuda-sm90", "cuda-sm120", "xpu", "cpu"])
@pytest.mark.parametrize("shape", [(24576, 4096), (4096, 12288), (1000, 640), (64, 128)])
def test_every_device_and_shape_has_a_plan(family, shape):
    groups = shape[1] // 128
    plan = tiles.plan("int4_linear", family, *shape, groups)
    assert 1 <= plan.parts <= groups
    bounds = [bound for bound, _ in plan.tiles]
    assert bounds == sorted(bounds)
    for rows in (1, 16, 17, 300, 16384):
        tile = plan.tile(rows)
        assert tile.kernel in ("split", "walk")
        # An XPU's matrix unit takes the rows as its left operand, 8 at a time.
        least, columns = (8, (256, 512)) if tile.left else (16, (64, 128))
        assert tile.left == (family == "xpu") and tile.bm >= least and tile.bn in columns


def test_a_register_file_is_asked_of_an_xpu_only():
    tile = tiles.plan("int4_linear", "xpu", 4096, 4096, 32).tile(1)
    assert (tile.bn, tile.bm, tile.warps, tile.grf) == (512, 8, 32, 256)
    for device in ("cuda", "cpu"):
        assert tiles.backend_options(tile, torch.device(device)) == {}
    assert tiles.backend_options(tiles.Tile("walk", 64, 64, 4, 3), torch.device("xpu")) == {}


def test_the_partition_never_follows_the_row_count():
    """A plan holds one number of parts; only tiles are looked up by rows."""
    plan = tiles.plan("int4_linear", "cuda-sm90", 4096, 4096, 32)
    assert isinstance(plan.parts, int) and not hasattr(plan.tile(1), "parts")


@pytest.mark.parametrize("columns", [64, 4096, 24576, 248320])
def test_the_counters_cover_every_split_that_fits_the_workspace(columns):
    for parts in (2, 8):
        rows = int4_gemm.WORKSPACE // (4 * parts * columns)
        for bn, bm in ((64, 8), (64, 16), (128, 16)):
            needed = -(-columns // bn) * -(-rows // bm)
            assert needed <= int4_gemm.counters(columns)
