"""W4A16 on the CPU: equal to the reference bit for bit, and C1 for every row count."""

import pytest
import torch

from vllm_b70.ops.int4_linear import int4_linear, int4_linear_naive, pack_int4, unpack_int4
from vllm_b70.reference.int4_linear import int4_linear as reference

ROW_COUNTS = [*range(1, 66), 127, 128, 129, 512, 1000]


def weights(depth, columns, group_size, symmetric=True, bias=False, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    groups = depth // group_size
    q = torch.randint(0, 16, (depth, columns), dtype=torch.uint8, generator=generator)
    scale = torch.rand(groups, columns, generator=generator).to(dtype).float() * 0.1
    zero = None
    if not symmetric:
        zero = torch.randint(0, 16, (groups, columns), dtype=torch.uint8, generator=generator)
    b = torch.randn(columns, generator=generator).to(dtype) if bias else None
    return q, scale, zero, b


def rows(count, depth, dtype=torch.bfloat16, seed=1):
    return torch.randn(count, depth, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("depth", "columns", "group_size"),
    [(256, 96, 32), (128, 65, 64), (256, 130, 128), (192, 64, 192), (99, 7, 99), (1, 1, 1)],
)
def test_equals_the_reference(depth, columns, group_size, symmetric, dtype):
    q, scale, zero, bias = weights(depth, columns, group_size, symmetric, True, dtype)
    x = rows(37, depth, dtype)
    got = int4_linear(x, pack_int4(q), scale, zero, bias, group_size)
    assert torch.equal(got, reference(x, q, scale, zero, bias, group_size))


def test_is_close_to_a_dequantised_matmul_in_double():
    q, scale, zero, bias = weights(512, 64, 128, symmetric=False, bias=True)
    x = rows(9, 512)
    dense = (q.double() - zero.double().repeat_interleave(128, 0)) * scale.double()[
        torch.arange(512) // 128
    ]
    expected = x.double() @ dense + bias.double()
    got = int4_linear(x, pack_int4(q), scale, zero, bias, 128)
    torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("bias", [False, True])
def test_c1_row_count(bias):
    q, scale, zero, b = weights(256, 192, 64, symmetric=False, bias=bias)
    weight, x = pack_int4(q), rows(1000, 256)
    alone = torch.cat([int4_linear(x[i : i + 1], weight, scale, zero, b, 64) for i in range(1000)])
    for count in ROW_COUNTS:
        got = int4_linear(x[:count], weight, scale, zero, b, 64)
        assert torch.equal(got, alone[:count]), f"{count} rows"


def test_c1_neighbours_shuffled_padded_and_poisoned():
    q, scale, zero, b = weights(256, 128, 128)
    weight, x = pack_int4(q), rows(129, 256)
    expected = int4_linear(x, weight, scale, zero, b, 128)
    order = torch.randperm(129, generator=torch.Generator().manual_seed(3))
    assert torch.equal(int4_linear(x[order], weight, scale, zero, b, 128), expected[order])
    poisoned = torch.full((300, 256), float("nan"), dtype=torch.bfloat16)
    where = torch.arange(129) * 2 + 17
    poisoned[where] = x
    got = int4_linear(poisoned, weight, scale, zero, b, 128)
    assert torch.equal(got[where], expected)
    assert got[0].isnan().all()


def test_the_control_does_follow_the_row_count():
    """Without this the C1 tests might pass on a machine whose BLAS happens to be invariant."""
    q, scale, zero, b = weights(512, 1024, 32)
    weight, x = pack_int4(q), rows(129, 512)
    alone = torch.cat(
        [int4_linear_naive(x[i : i + 1], weight, scale, zero, b, 32) for i in range(129)]
    )
    differing = sum(
        not torch.equal(int4_linear_naive(x[:count], weight, scale, zero, b, 32), alone[:count])
        for count in (2, 16, 33, 64, 129)
    )
    assert differing > 0


def test_no_rows_and_infinity():
    q, scale, zero, b = weights(64, 32, 32)
    weight = pack_int4(q)
    assert int4_linear(rows(0, 64), weight, scale, zero, b, 32).shape == (0, 32)
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    ones = torch.full((2, 32), 100.0)
    got = int4_linear(x, pack_int4(torch.full((64, 32), 15)), ones, None, None, 32)
    assert got.isinf().all(), "fp16 overflow is infinity, as in vLLM's own kernels"


@pytest.mark.parametrize("depth", [1, 2, 7, 64, 99])
def test_pack_round_trip(depth):
    q, *_ = weights(depth, 33, depth)
    assert torch.equal(unpack_int4(pack_int4(q), depth), q)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 64)}, "bfloat16 or float16"),
        ({"x": torch.zeros(64, dtype=torch.bfloat16)}, r"\[M, K\]"),
        ({"weight": torch.zeros(31, 32, dtype=torch.uint8)}, r"uint8 \[32, N\]"),
        ({"group_size": 48}, "48 does not divide K=64"),
        ({"scale": torch.zeros(2, 31)}, "scale must be float32"),
        ({"zero": torch.zeros(2, 32)}, "zero must be uint8"),
        ({"bias": torch.zeros(31)}, r"bias must be \[32\]"),
    ],
)
def test_bad_arguments(change, message):
    q, scale, zero, b = weights(64, 32, 32)
    arguments = {
        "x": rows(2, 64),
        "weight": pack_int4(q),
        "scale": scale,
        "zero": zero,
        "bias": b,
        "group_size": 32,
    } | change
    with pytest.raises(ValueError, match=message):
        int4_linear(**arguments)


def test_threads_do_not_show():
    q, scale, zero, b = weights(256, 300, 32)
    weight, x = pack_int4(q), rows(65, 256)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = int4_linear(x, weight, scale, zero, b, 32)
        torch.set_num_threads(2)
        assert torch.equal(int4_linear(x, weight, scale, zero, b, 32), one)
    finally:
        torch.set_num_threads(threads)


def test_is_opaque_to_torch_compile_with_any_row_count():
    q, scale, zero, b = weights(64, 32, 32)
    weight = pack_int4(q)

    def layer(x):
        return torch.ops.vllm_b70.int4_linear(x, weight, scale, zero, b, 32) * 2

    compiled = torch.compile(layer, backend="eager", dynamic=True, fullgraph=True)
    for count in (1, 2, 65):
        x = rows(count, 64)
        assert torch.equal(compiled(x), layer(x))
