"""The norms in the interpreter: every launch equals the reference, bit for bit."""

import pytest
import torch

from vllm_b70.ops.norm import add_rms_norm, gated_rms_norm_gpu, l2_norm, launch, rms_norm
from vllm_b70.reference import norm as reference

EPSILON = 1e-6
LAUNCHES = [(1, 1), (1, 4), (1, 8), (1, 16), (2, 4), (8, 2)]


def rows(*shape, dtype=torch.bfloat16, seed=0, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [1, 33, 128, 256, 1000, 3072, 4096, 5120])
def test_equals_the_reference(columns, dtype):
    x, residual = rows(5, columns, dtype=dtype), rows(5, columns, dtype=dtype, seed=1)
    weight = rows(columns, seed=2, dtype=torch.float32)
    for offset in (0.0, 1.0):
        want = reference.rms_norm(x, weight, EPSILON, offset)
        assert torch.equal(rms_norm(x, weight, EPSILON, offset), want)
        want = reference.add_rms_norm(x, residual, weight, EPSILON, offset)
        got = add_rms_norm(x, residual, weight, EPSILON, offset)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert torch.equal(got[0], rms_norm(want[1], weight, EPSILON, offset)), "fused or not"
    assert torch.equal(rms_norm(x, None, EPSILON, 0.0), reference.rms_norm(x, None, EPSILON))
    assert torch.equal(l2_norm(x, EPSILON), reference.l2_norm(x, EPSILON))


@pytest.mark.parametrize("columns", [40, 256, 3072, 4096])
def test_c1_rows_launches_and_neighbours(columns):
    x = rows(40, columns)
    weight = rows(columns, seed=2)
    alone = torch.cat([rms_norm(x[i : i + 1], weight, EPSILON, 0.0) for i in range(40)])
    for count in (1, 2, 17, 40):
        for program, warps in LAUNCHES:
            got = launch(x[:count], weight, EPSILON, rows_a_program=program, warps=warps)[0]
            assert torch.equal(got, alone[:count])
    poisoned = torch.full((64, columns), float("nan"), dtype=x.dtype)
    poisoned[1::2] = float("inf")
    poisoned[3:43] = x
    assert torch.equal(rms_norm(poisoned, weight, EPSILON, 0.0)[3:43], alone)


def test_heads_of_a_wider_row_are_read_in_place():
    fused = rows(7, 3 * 128 + 5)
    heads = fused[:, 2 : 2 + 3 * 128].view(7, 3, 128)
    weight = rows(128, seed=2)
    got = rms_norm(heads, weight, EPSILON, 1.0)
    assert got.is_contiguous()
    assert torch.equal(got, reference.rms_norm(heads, weight, EPSILON, 1.0))


@pytest.mark.parametrize("sigmoid_only", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_norm(sigmoid_only, dtype):
    x, z = rows(9, 4, 64, dtype=dtype), rows(9, 4, 64, dtype=dtype, seed=1, scale=4.0)
    weight = rows(64, seed=2)
    got = gated_rms_norm_gpu(x, z, weight, EPSILON, sigmoid_only)
    want = reference.gated_rms_norm(x, z, weight, EPSILON, "sigmoid" if sigmoid_only else "silu")
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
    for count in (1, 4):
        part = gated_rms_norm_gpu(x[:count], z[:count], weight, EPSILON, sigmoid_only)
        assert torch.equal(part, got[:count])


def test_no_rows_and_shapes_that_do_not_fit():
    assert rms_norm(rows(0, 64), None, EPSILON, 0.0).shape == (0, 64)
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(rows(2, 64), rows(63), EPSILON, 0.0)
    with pytest.raises(ValueError, match="residual must be"):
        add_rms_norm(rows(2, 64), rows(3, 64), None, EPSILON, 0.0)
