"""The norms on a GPU: one set of bits for every row count, launch and capture."""

import pytest
import torch

from vllm_b70.ops.norm import add_rms_norm, gated_rms_norm_gpu, l2_norm, launch, rms_norm
from vllm_b70.reference import norm as reference

EPSILON = 1e-6
DTYPES = [torch.bfloat16, torch.float16]
COLUMNS = [4096, 5120, 128, 256, 1000, 33]
ROWS = [1, 2, 3, 17, 64, 511, 512, 513, 1000, 4096]


def rows(*shape, dtype=torch.bfloat16, seed=0, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(*shape, device="cuda", generator=generator)).to(dtype)


def differing(a, b):
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_c1_row_counts(columns, dtype):
    x, residual = rows(4096, columns, dtype=dtype), rows(4096, columns, dtype=dtype, seed=1)
    z, weight = rows(4096, columns, dtype=dtype, seed=2), rows(columns, dtype=dtype, seed=3)

    def all_of(part):
        a, b, c = x[part], residual[part], z[part]
        return (
            rms_norm(a, weight, EPSILON, 1.0),
            *add_rms_norm(a, b, weight, EPSILON, 1.0),
            gated_rms_norm_gpu(a, c, weight, EPSILON, False),
            l2_norm(a, EPSILON),
        )

    whole = all_of(slice(None))
    assert not any(y.isnan().any() for y in whole)
    for count in ROWS:
        for got, want in zip(all_of(slice(count)), whole, strict=True):
            assert differing(got, want[:count]) == 0, f"{count} rows"
    # Rows that begin at an odd address: the compiler then loads one value at a time.
    for got, want in zip(all_of(slice(1, 40)), whole, strict=True):
        assert differing(got, want[1:40]) == 0, "unaligned"
    launches = [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 4), (4, 8)]
    for program, warps in launches + [(8, 1), (32, 4)] * (columns <= 256):
        got = launch(x[:64], weight, EPSILON, offset=1.0, rows_a_program=program, warps=warps)[0]
        assert differing(got, whole[0][:64]) == 0, f"{program} rows a program, {warps} warps"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_norm_is_the_addition_and_the_norm(dtype):
    x, residual = rows(300, 4096, dtype=dtype), rows(300, 4096, dtype=dtype, seed=1)
    weight = rows(4096, dtype=dtype, seed=3)
    out, total = add_rms_norm(x, residual, weight, EPSILON, 1.0)
    assert differing(total, x + residual) == 0
    assert differing(out, rms_norm(total, weight, EPSILON, 1.0)) == 0


@pytest.mark.parametrize("columns", [4096, 5120, 128])
def test_error_against_float64(columns):
    x, weight = rows(64, columns), rows(columns, seed=3)
    got = rms_norm(x, weight, EPSILON, 1.0).double()
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt()
    exact = exact * (weight.double() + 1.0)
    assert ((got - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    close = reference.rms_norm(x.cpu(), weight.cpu(), EPSILON, 1.0)
    assert differing(got.bfloat16().cpu(), close) < 0.01 * close.numel(), "another last bit"


def test_heads_in_place_poisoned_neighbours_and_capture():
    fused = rows(70, 12 * 256 + 512)
    heads = fused[:, 256 : 256 + 4 * 256].view(70, 4, 256)
    weight = rows(256, seed=3)
    want = rms_norm(heads.contiguous(), weight, EPSILON, 1.0)
    assert differing(rms_norm(heads, weight, EPSILON, 1.0), want) == 0
    poisoned = torch.full((800, 4, 256), float("nan"), dtype=torch.bfloat16, device="cuda")
    poisoned[1::2] = float("inf")
    poisoned[100:170] = heads
    assert differing(rms_norm(poisoned, weight, EPSILON, 1.0)[100:170], want) == 0
    static = torch.zeros_like(want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rms_norm(static, weight, EPSILON, 1.0)
    static.copy_(heads)
    graph.replay()
    assert differing(out, want) == 0
