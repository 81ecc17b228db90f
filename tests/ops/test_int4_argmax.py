"""The argmax op's checks, its table and its opacity, on a machine without a GPU."""

import pytest
import torch

from vllm_b70.ops import int4_argmax, int4_gemm, tiles
from vllm_b70.ops.int4_words import Int4Words, pack_words

SHAPES = [(248320, 4096), (248320, 5120), (65536, 4096), (70, 256)]


def arguments(**change):
    q = torch.randint(0, 16, (256, 64))
    packed = pack_words(lambda a, b: q[a:b], 256, 64, torch.rand(2, 64), None, 128, torch.float16)
    x = torch.zeros(2, 256, dtype=torch.float16)
    given = {"x": x, "words": packed.words, "scale": packed.scale, "columns": 64, "group": 128}
    return given | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 256)}, "bfloat16 or float16"),
        ({"x": torch.zeros(2, 200, dtype=torch.float16)}, "K=200 is not a multiple"),
        ({"columns": 65}, r"words must be int32 \(2, 128, 16\)"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        int4_argmax.int4_argmax(**arguments(**change))


def test_no_rows():
    value, index = int4_argmax.int4_argmax(**arguments(x=torch.zeros(0, 256).half()))
    assert value.shape == index.shape == (0,) and index.dtype == torch.int64


def test_torch_compile_sees_shapes_alone():
    given = arguments()

    def best(x):
        return torch.ops.vllm_b70.int4_argmax(x, given["words"], given["scale"], 64, 128)

    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        value, index = best(mode.from_tensor(given["x"]))
    assert (value.shape, value.dtype) == ((2,), torch.float32)
    assert (index.shape, index.dtype) == ((2,), torch.int64)


@pytest.mark.parametrize("family", ["cuda-sm90", "cuda-sm120", "xpu", "cpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_device_and_shape_has_a_plan(family, shape):
    groups = shape[1] // 128
    plan = tiles.plan(int4_argmax.OP, family, *shape, groups)
    for rows in (1, 16, 17, 64, 300):
        tile = plan.tile(rows)
        assert tile.left == (family == "xpu") and tile.bm <= 64


def test_the_partition_is_that_of_the_gemm():
    """So that a greedy draft is the argmax of the row that a sampled draft would be drawn from."""
    q = torch.randint(0, 16, (4096, 4096), dtype=torch.uint8)
    packed = pack_words(
        lambda a, b: q[a:b], 4096, 4096, torch.rand(32, 4096), None, 128, torch.float16
    )
    assert int4_argmax.parts_of(packed) == tiles.plan(int4_gemm.OP, "cpu", 4096, 4096, 32).parts > 1


@pytest.mark.parametrize(
    ("column_tiles", "row_tiles", "each", "processors", "want"),
    [(1940, 1, 4, 132, 528), (1940, 4, 4, 132, 132), (100, 1, 4, 132, 100), (1940, 999, 1, 132, 1)],
)
def test_programs_of_a_stream(column_tiles, row_tiles, each, processors, want):
    assert int4_argmax.programs(column_tiles, row_tiles, each, processors) == want


@pytest.mark.parametrize(
    ("kernel", "parts", "left", "wanted"),
    [
        ("stream", 1, False, "_stream"),
        ("stream", 2, False, "_walk"),
        ("stream", 1, True, "_walk"),
        ("walk", 1, False, "_walk"),
    ],
)
def test_what_a_stream_has_not_is_walked(kernel, parts, left, wanted, monkeypatch):
    called = []
    for name in ("_stream", "_walk"):
        monkeypatch.setattr(int4_argmax, name, lambda *_, name=name: called.append(name))
    given = arguments()
    packed = Int4Words(given["words"], given["scale"], None, 256, 64, 128)
    tile = tiles.Tile(kernel, 64, 16, 4, 3, left=left)
    filled = torch.empty(2), torch.empty(2, dtype=torch.int64)
    int4_argmax.launch(given["x"], packed, *filled, parts, tile, ptx=False)
    assert called == [wanted]


def test_scales_that_are_no_pairs_are_walked(monkeypatch):
    called = []
    for name in ("_stream", "_walk"):
        monkeypatch.setattr(int4_argmax, name, lambda *_, name=name: called.append(name))
    given = arguments()
    moved = torch.empty(2 * 64 + 1, dtype=torch.float16)[1:].view(2, 64).copy_(given["scale"])
    tile = tiles.Tile("stream", 64, 16, 4, 3)
    for scale in (given["scale"], moved):
        packed = Int4Words(given["words"], scale, None, 256, 64, 128)
        int4_argmax.launch(given["x"], packed, torch.empty(2), torch.empty(2), 1, tile, ptx=False)
    assert called == ["_stream", "_walk"]
