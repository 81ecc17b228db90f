"""Direct launches on a GPU: the bits of Triton's own, its argument binder left alone, and captured.

pytest -s tests/gpu/test_launch.py    also prints what both cost the host
"""

import time

import pytest
import torch

pytest.importorskip("triton")
from vllm_b70.ops import gemm, hopper, int4_gemm, launcher, norm, tiles
from vllm_b70.ops.launcher import Launcher

pytestmark = pytest.mark.skipif(not launcher.known(), reason="launches are Triton's own here")
DTYPES = [torch.bfloat16, torch.float16]
K, N = 1024, 512


def random(*shape, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def calls(dtype):
    """Ops by name, each of [M, K] rows."""
    weight, scales = random(N, K, dtype=dtype, seed=1), random(K, dtype=dtype, seed=2)
    done = torch.zeros(10000, dtype=torch.int32, device="cuda")
    words = torch.randint(-(2**31), 2**31 - 1, (K // 128, N, 16), device="cuda").int()
    scale = random(K // 128, N, dtype=dtype, seed=3) / 64
    integers = (words, scale, None, None, done)

    def linear(kernel, **more):
        columns, warps = (128, 8) if kernel == "wide" else (64, 4)
        tile = tiles.Tile(kernel, columns, 32, warps, 3, 64, **more)

        def call(x):
            out = torch.full((len(x), N), float("nan"), dtype=dtype, device="cuda")
            gemm.launch(x.contiguous(), weight, None, done, out, 2, tile)
            return out

        return call

    def four_bits(tile):
        def call(x):
            out = torch.full((len(x), N), float("nan"), dtype=dtype, device="cuda")
            served = int4_gemm.choose(tile, x, words, N, 128, 2)
            int4_gemm.launch(x, *integers, out, 128, 2, served, True)
            return out

        return call

    found = {
        "norm": lambda x: norm.rms_norm(x, scales, 1e-6, 1.0),
        "norm after an addition": lambda x: torch.cat(norm.add_rms_norm(x, x, scales, 1e-6, 0.0)),
        "gemm, split": linear("split"),
        "gemm, descriptors": linear("walk", tensor=True),
        "gemm, wide": linear("wide", tensor=True, persistent=True, overlap=True),
        "int4 gemm, split": four_bits(tiles.Tile("split", 64, 16, 4, 3)),
        "int4 gemm, walk": four_bits(tiles.Tile("walk", 64, 32, 4, 3)),
    }
    if hopper.available(torch.device("cuda")):
        for cut in ("", "tiles", "parts"):
            tile = tiles.Tile("hopper", 128, 64, 4, 1, cut=cut)
            found[f"int4 gemm, hopper {cut}".strip()] = four_bits(tile)
    return found


def by_triton(monkeypatch):
    """From here on no launch is direct."""
    monkeypatch.setattr(Launcher, "_watched", lambda self: True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_tritons_launch(dtype, monkeypatch):
    rows = random(302, K, dtype=dtype).view(-1)
    inputs = {
        f"{count} rows, {off} values on": rows[off : off + count * K].view(count, K)
        for off in (0, 1, 8, 4)
        for count in (1, 2, 16, 17, 300)
    }
    ops = calls(dtype)
    direct = {}
    for turn in range(3):
        for name, call in ops.items():
            for what, x in inputs.items():
                got = call(x)
                assert not got.isnan().any(), (name, what)
                if turn:
                    assert torch.equal(got, direct[name, what]), (name, what)
                direct[name, what] = got
    by_triton(monkeypatch)
    for name, call in ops.items():
        for what, x in inputs.items():
            assert torch.equal(call(x), direct[name, what]), (name, what)


def test_a_second_launch_binds_nothing(monkeypatch):
    from triton.runtime.jit import JITFunction

    x, ops = random(40, K, dtype=torch.bfloat16), calls(torch.bfloat16)
    want = {name: call(x) for name, call in ops.items()}

    def run(self, *args, **kwargs):
        raise AssertionError(f"{self.__name__} was launched by Triton")

    monkeypatch.setattr(JITFunction, "run", run)
    for name, call in ops.items():
        assert torch.equal(call(x), want[name]), name
    # Another dtype is another kernel, which only Triton can compile.
    with pytest.raises(AssertionError, match="rms_norm was launched by Triton"):
        norm.rms_norm(x.float(), None, 1e-6, 1.0)


def test_a_graph_holds_it():
    x, other = (random(40, K, dtype=torch.bfloat16, seed=seed) for seed in (5, 6))
    buffer = x.clone()
    for name, call in calls(torch.bfloat16).items():
        want = call(x), call(other)
        buffer.copy_(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call(buffer)
        for rows, expected in zip((x, other), want, strict=True):
            buffer.copy_(rows)
            graph.replay()
            assert torch.equal(got, expected), name


def test_a_tensor_of_another_device_is_refused():
    """By Triton, for no entry is found: an address of the host would fault."""
    x = random(4, K, dtype=torch.bfloat16)
    scales = random(K, dtype=torch.bfloat16)
    norm.rms_norm(x, scales, 1e-6, 1.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            norm.rms_norm(x, scales.cpu(), 1e-6, 1.0)


def test_what_a_launch_costs_the_host(monkeypatch):
    """Printed only: it is the machine's."""
    x, ops = random(300, K, dtype=torch.bfloat16), calls(torch.bfloat16)

    def cost(call):
        found = []
        for _ in range(5):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(100):
                call(x)
            found.append(1e4 * (time.perf_counter() - begun))
        torch.cuda.synchronize()
        return min(found)

    for call in ops.values():
        call(x)
    direct = {name: cost(call) for name, call in ops.items()}
    by_triton(monkeypatch)
    for name, call in ops.items():
        print(
            f"\n{name}: {direct[name]:.1f} us an op on the host, {cost(call):.1f} by Triton", end=""
        )
