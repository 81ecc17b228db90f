"""16-bit linears on the CPU: equal to the reference bit for bit, and C1 for every row count."""

import pytest
import torch

from vllm_b70.ops.linear import linear, pack
from vllm_b70.reference.linear import linear as reference

ROW_COUNTS = [*range(1, 66), 127, 128, 129, 512, 1000]


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("depth", "columns"), [(256, 96), (64, 1), (63, 65), (1, 3), (130, 200)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_reference(depth, columns, bias, dtype):
    x, weight = random(37, depth, dtype=dtype), random(columns, depth, dtype=dtype, seed=1)
    b = random(columns, dtype=dtype, seed=2) if bias else None
    assert torch.equal(linear(x, pack(weight), b), reference(x, weight, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_finite_weight_value_is_read_exactly(dtype):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    values = bits[bits.isfinite()].reshape(-1, 1)
    one = torch.ones(1, 1, dtype=dtype)
    assert torch.equal(linear(one, pack(values), None)[0], values[:, 0])
    special = torch.tensor([[float("inf")], [-float("inf")], [float("nan")]], dtype=dtype)
    got = linear(one, pack(special), None)[0]
    assert got[0] == float("inf") and got[1] == -float("inf") and got[2].isnan()


def test_c1_row_count():
    x, weight = random(1000, 256), pack(random(192, 256, seed=1))
    alone = torch.cat([linear(x[i : i + 1], weight, None) for i in range(1000)])
    for count in ROW_COUNTS:
        assert torch.equal(linear(x[:count], weight, None), alone[:count]), f"{count} rows"


def test_c1_neighbours_shuffled_padded_and_poisoned():
    x, weight = random(129, 256), pack(random(128, 256, seed=1))
    expected = linear(x, weight, None)
    order = torch.randperm(129, generator=torch.Generator().manual_seed(3))
    assert torch.equal(linear(x[order], weight, None), expected[order])
    poisoned = torch.full((300, 256), float("nan"), dtype=torch.bfloat16)
    where = torch.arange(129) * 2 + 17
    poisoned[where] = x
    assert torch.equal(linear(poisoned, weight, None)[where], expected)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(8, 4), None, "bfloat16 or float16"),
        (random(2, 8), random(7, 4), None, r"\[8, N\]"),
        (random(2, 8), random(8, 4, dtype=torch.float16), None, "weight must be torch.bfloat16"),
        (random(2, 8), random(8, 4), random(5), r"bias must be \[4\]"),
    ],
)
def test_bad_arguments(x, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        linear(x, weight, bias)
