"""Kernels that start while the one before them ends read what it wrote, and nothing older."""

import pytest
import torch

from vllm_b70.ops import gemm, hopper, int4_gemm, norm, tiles
from vllm_b70.ops.int4_words import pack_words
from vllm_b70.ops.norm import add_rms_norm, rms_norm

WIDTH = 4096


def needs_overlap():
    if not tiles.overlap_options(torch.device("cuda", 0))["PDL"]:
        pytest.skip("this device cannot overlap launches")


def random(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


def forget():
    """Launchers were made with what ``overlap_options`` said then."""
    for op in (gemm, hopper, int4_gemm, norm):
        op._launcher.cache_clear()


class Chain:
    """Norms and products that each need the one before; products share counters and a workspace."""

    def __init__(self, rows):
        self.x, self.scale = random(rows, WIDTH), random(WIDTH, seed=1)
        self.weight = random(WIDTH, WIDTH, seed=2) * 0.02
        self.done = torch.zeros(gemm.counters(WIDTH), dtype=torch.int32, device="cuda")
        generator = torch.Generator("cuda").manual_seed(3)
        scales = torch.rand(WIDTH // 128, WIDTH, device="cuda", generator=generator) * 0.01
        self.words = pack_words(
            lambda a, b: torch.randint(0, 16, (b - a, WIDTH), device="cuda", generator=generator),
            WIDTH, WIDTH, scales, None, 128, torch.bfloat16,
        )  # fmt: skip
        self.counters = torch.zeros(int4_gemm.counters(WIDTH), dtype=torch.int32, device="cuda")

    def __call__(self):
        y, residual = self.x, self.x
        for _ in range(12):
            y, residual = add_rms_norm(y, residual, self.scale, 1e-6, 1.0)
            y = gemm.gemm(y, self.weight, None, self.done, 0)
            y = int4_gemm.apply(y, self.words, None, self.counters, 0)
            self.scale.copy_(y[0])  # a parameter that changes just before the norm that reads it
            y = rms_norm(y, self.scale, 1e-6, 1.0)
        return y


@pytest.mark.parametrize("rows", [1, 16, 64, 128, 256, 600])
def test_a_chain_gives_the_bits_of_launches_in_turn(rows, monkeypatch):
    needs_overlap()
    chain = Chain(rows)
    start, scale = chain.x.clone(), chain.scale.clone()

    def reset(seed):
        chain.x.copy_(start.roll(seed, 1))
        chain.scale.copy_(scale)

    with monkeypatch.context() as patch:
        patch.setattr(tiles, "overlap_options", lambda device, wanted: {"PDL": False})
        forget()
        want = []
        for seed in range(4):
            reset(seed)
            want.append(chain())
    forget()
    assert not torch.equal(want[0], want[1]) and not want[0].isnan().any()
    reset(0)
    graph = torch.cuda.CUDAGraph()
    chain()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = chain()
    for turn in range(40):
        reset(turn % 4)
        got = chain()
        reset(turn % 4)
        graph.replay()
        for y in (got, captured):
            assert torch.equal(y, want[turn % 4]), f"turn {turn}"
    assert not chain.done.any() and not chain.counters.any()
