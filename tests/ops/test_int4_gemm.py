"""The GPU op's checks and its table, on a machine without a GPU."""

import itertools
import subprocess
import sys

import pytest
import torch

from vllm_b70.ops import hopper, int4_gemm, split, tiles
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
        assert tile.kernel in ("split", "walk") or family == "cuda-sm90"
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
        rows = split.WORKSPACE // (4 * parts * columns)
        for bn, bm in ((64, 8), (64, 16), (128, 16)):
            needed = -(-columns // bn) * -(-rows // bm)
            assert needed <= int4_gemm.counters(columns)


HOPPER = tiles.Tile("hopper", 128, 128, 8, 3)


@pytest.fixture
def on_hopper(monkeypatch):
    """A machine that could run the Hopper kernel, as far as the choice of a tile asks."""
    monkeypatch.setattr(tiles, "family", lambda device: "cuda-sm90")
    monkeypatch.setattr(hopper, "compiles", lambda: True)


def hopper_call(**change):
    given = {
        "tile": HOPPER,
        "x": torch.zeros(300, 512, dtype=torch.float16),
        "words": torch.zeros(4, 64, 16, dtype=torch.int32),
        "columns": 64,
        "group": 128,
        "parts": 2,
    }
    return given | change


def test_a_hopper_tile_is_taken_on_a_hopper(on_hopper):
    assert int4_gemm.choose(**hopper_call()) == HOPPER


@pytest.mark.parametrize(
    "change",
    [
        {"group": 64, "words": torch.zeros(8, 64, 8, dtype=torch.int32)},
        {"x": torch.zeros(300, 500, dtype=torch.float16)},
        {"parts": 3},
        {"x": torch.zeros(300 * 512 + 1, dtype=torch.float16)[1:].view(300, 512)},
        {"words": torch.zeros(4 * 64 * 16 + 1, dtype=torch.int32)[1:].view(4, 64, 16)},
    ],
    ids=["group", "cut off", "one group a part", "x off a border", "words off a border"],
)
def test_what_the_hopper_kernel_cannot_serve_is_walked(on_hopper, change):
    tile = int4_gemm.choose(**hopper_call(**change))
    assert tile == tiles.replace(HOPPER, kernel="walk")


@pytest.mark.parametrize("family", ["cuda-sm80", "cuda-sm100", "cuda-sm120", "xpu", "cpu"])
def test_other_devices_walk(on_hopper, monkeypatch, family):
    monkeypatch.setattr(tiles, "family", lambda device: family)
    assert int4_gemm.choose(**hopper_call()).kernel == "walk"


def test_a_triton_that_was_not_tried_walks(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(tiles, "family", lambda device: "cuda-sm90")
    for version, kernel in (("3.6.0", "hopper"), ("3.5.1", "walk"), ("4.0.0+git1", "walk")):
        monkeypatch.setattr(triton, "__version__", version)
        hopper.compiles.cache_clear()
        assert int4_gemm.choose(**hopper_call()).kernel == kernel
    hopper.compiles.cache_clear()


def test_a_hopper_tile_named_outright_is_refused_elsewhere(on_hopper, monkeypatch):
    given = arguments()
    out = torch.empty(2, 64, dtype=torch.float16)

    def launch(tile, group=128):
        int4_gemm.launch(
            given["x"], given["words"], given["scale"], None, None, given["done"], out, group, 1,
            tile, ptx=True,
        )  # fmt: skip

    with pytest.raises(ValueError, match="no tile of 256 columns"):
        launch(tiles.replace(HOPPER, bn=256))
    with pytest.raises(ValueError, match="no groups of 64"):
        launch(HOPPER, group=64)
    monkeypatch.setattr(tiles, "family", lambda device: "xpu")
    with pytest.raises(ValueError, match="cannot serve"):
        launch(HOPPER)


def test_split_parts_beyond_the_workspace_are_walked():
    tile = tiles.Tile("split", 64, 64, 4, 3)
    fits = split.WORKSPACE // (4 * 2 * 64)
    for rows, kernel in ((fits, "split"), (fits + 1, "walk")):
        x = torch.empty(rows, 1, dtype=torch.float16)
        assert int4_gemm.choose(**hopper_call(tile=tile, x=x)).kernel == kernel


def test_the_hopper_tiles_of_the_table():
    for name in tiles._table("int4_linear")["cuda-sm90"]:
        # The default serves the weights that have no entry.
        shape = "8192x4096" if name == "default" else name
        columns, depth = map(int, shape.split("x"))
        plan = tiles.plan("int4_linear", "cuda-sm90", columns, depth, depth // 128)
        chosen = [(bound, t) for bound, t in plan.tiles if t.kernel == "hopper"]
        assert chosen and plan.parts * 2 <= depth // 128
        for bound, tile in chosen:
            assert (tile.bn, tile.bm in hopper.BM, bound >= 64) == (hopper.BN, True, True)
            # What walks in its place: a tile of Triton's as the benchmark tries it.
            assert (tile.warps, tile.stages) == (8, 3)


def test_the_hopper_kernel_fits_shared_memory():
    for bm in hopper.BM:
        assert hopper.stages(bm) >= 4
        used = hopper.BN * bm * 4 + hopper.stages(bm) * bm * hopper.GROUP * 2
        assert used <= hopper.SHARED


def test_the_hopper_kernel_is_imported_by_no_one_else():
    """The package imports, and serves, where there is no Gluon."""
    code = "import sys, vllm_b70.ops.int4_gemm, vllm_b70.kernels.int4_linear; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "vllm_b70.kernels.int4_linear_hopper" not in done.stdout.split()


def test_how_the_hopper_kernel_is_launched(on_hopper, monkeypatch):
    """Every argument in its place, and a persistent grid."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    kernels = pytest.importorskip("vllm_b70.kernels.int4_linear_hopper")
    names, calls = kernels.walk.arg_names, []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *given, **more: calls.append(
                (grid, dict(zip(names, given, strict=False)) | more)
            )

    monkeypatch.setattr(kernels, "walk", Recorder())
    call = hopper_call()
    scale = torch.zeros(4, 64, dtype=torch.float16)
    for rows, programs in ((1, 1), (300, 3), (700, tiles.processors(torch.device("cpu")))):
        x, out = torch.zeros(rows, 512, dtype=torch.float16), torch.empty(rows, 64).half()
        int4_gemm.launch(x, call["words"], scale, None, None, scale, out, 128, 2, HOPPER, True)
        grid, given = calls.pop()
        assert grid == (programs,)
        assert set(given) - {"num_warps", "enable_fp_fusion"} == set(names)
        assert given["x_at"].base is x and given["x_at"].block_shape == [128, 128]
        expected = dict(M=rows, N=64, NP=64, groups=4, row_tiles=-(-rows // 128), column_tiles=1,
                        strided=-(-rows // 128), zero=0, PARTS=2, CUT="", FP16=True,
                        ASYMMETRIC=False, BIAS=False, EVEN_N=False,
                        enable_fp_fusion=False)  # fmt: skip
        assert {name: given[name] for name in expected} == expected
        assert given["out"] is out and given["scale"] is scale and given["words"] is call["words"]
    # Six tiles of four groups on four programs; too few groups to share parts of two.
    for cut in ("tiles", "parts"):
        tile = tiles.replace(HOPPER, cut=cut)
        int4_gemm.launch(x, call["words"], scale, None, None, scale, out, 128, 2, tile, True)
        grid, given = calls.pop()
        assert (grid, given["CUT"], given["strided"]) == ((4,), "tiles", 0)
        assert given["state"].numel() == 2 * 4 * 128 * 128


@pytest.mark.parametrize("columns", [1, 64, 5120, 34816, 10**6])
def test_counters_and_workspace_do_for_shared_tiles(columns):
    done = int4_gemm.counters(columns)
    for rows, bm, cut in itertools.product((1, 64, 200, 16384), hopper.BM, ("tiles", "parts")):
        count = -(-rows // bm) * -(-columns // hopper.BN)
        plan = hopper.share(cut, count, 136, 8, 132, bm)
        assert plan.counters <= done
        assert plan.sums * hopper.BN * bm * 4 <= split.WORKSPACE
