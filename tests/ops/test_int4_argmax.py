"""The argmax op's checks, its table and its opacity, on a machine without a GPU."""

import pytest
import torch

from vllm_b70.ops import int4_argmax, int4_gemm, tiles
from vllm_b70.ops.int4_words import pack_words

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
        assert tile.left or tile.bm >= 16


def test_the_partition_is_that_of_the_gemm():
    """Whatever follows from a weight's shape has one table."""
    q = torch.randint(0, 16, (4096, 4096), dtype=torch.uint8)
    packed = pack_words(
        lambda a, b: q[a:b], 4096, 4096, torch.rand(32, 4096), None, 128, torch.float16
    )
    assert int4_argmax.parts_of(packed) == tiles.plan(int4_gemm.OP, "cpu", 4096, 4096, 32).parts > 1
