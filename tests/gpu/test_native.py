"""cuBLAS in certified row classes on a GPU: every row count, capture, and what auto picks.

pytest tests/gpu/test_native.py -s    # prints classes and times
"""

import logging
import time
import types

import pytest
import torch

from vllm_b70.ops import native
from vllm_b70.ops import row_classes as rc

DEVICE = torch.device("cuda", 0)
COLUMNS, DEPTH, MOST = 4096, 4096, 1024


@pytest.fixture(scope="module")
def found():
    """A weight, its classes and the spans of its plan."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    weight = torch.randn(COLUMNS, DEPTH, generator=generator, device=DEVICE).bfloat16()
    gemm = native.linear_gemm(weight)
    counts = rc.row_counts(MOST, 2**44, COLUMNS * DEPTH, 2**33)
    bases = rc.inputs(MOST + rc.compared(COLUMNS), DEPTH, torch.bfloat16, DEVICE)
    gemm(bases[0][:64])
    begin = time.perf_counter()
    classes = rc.find(gemm, bases, counts)
    middle = time.perf_counter()
    plan = rc.make_plan(gemm, bases, counts, weight.nbytes)
    print(f"\n{len(counts)} row counts, classes found in {middle - begin:.2f} s, ", end="")
    print(f"planned in {time.perf_counter() - middle:.2f} s: {plan.why}")
    for one in classes:
        print("class", rc.spans(one.members)[:12], "*" * (one.members == plan.members))
    assert plan.members, plan.why
    native.reserve(DEVICE, torch.bfloat16, DEPTH, plan.members[-1])
    return weight, classes, rc.spans(plan.members)


def rows(count, seed=2):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(count, DEPTH, generator=generator, device=DEVICE).bfloat16()


def differing(a, b):
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def op(x, found):
    return torch.ops.vllm_b70.native_linear(x, found[0], None, found[2])


def test_stock_changes_bits_with_the_rows(found):
    """Otherwise this file shows nothing."""
    assert len(found[1]) > 1
    x = rows(320)
    whole = torch.nn.functional.linear(x, found[0])
    changed = [
        n for n in range(1, 321) if differing(native.linear_gemm(found[0])(x[:n]), whole[:n])
    ]
    assert changed


def test_every_row_count_and_order(found):
    x = rows(3000)
    whole = op(x, found)
    wanted = x.float() @ found[0].float().t()
    assert torch.allclose(whole.float(), wanted, atol=2, rtol=0.02)
    bad = [n for n in range(1, 321) if differing(op(x[:n], found), whole[:n])]
    bad += [-n for n in range(1, 321) if differing(op(x[3000 - n :], found), whole[3000 - n :])]
    assert bad == []
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(3000, generator=generator)[: 1 + 97 * seed].to(DEVICE)
        assert differing(op(x[order], found), whole[order]) == 0


def test_rows_beside_anything(found):
    x = rows(200)
    whole = op(x, found)
    poisoned = x.clone()
    poisoned[1::2] = float("nan")
    assert differing(op(poisoned, found)[::2], whole[::2]) == 0


@pytest.mark.parametrize("count", [1, 4, 33, 64, 256, 320, 1500])
def test_captured_replays_are_eager(count, found):
    x = rows(count)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op(x, found)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x, found)
    for seed in (3, 4):
        x.copy_(rows(count, seed))
        graph.replay()
        assert differing(out, op(rows(count, seed), found)) == 0


def test_auto_picks_and_keeps(tmp_path, monkeypatch, caplog):
    pytest.importorskip("vllm", reason="needs vLLM's classes")
    from vllm_b70.census import linears, settled
    from vllm_b70.layers import native as layers
    from vllm_b70.layers.linear import RowInvariantLinearMethod
    from vllm_b70.settings import Settings

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.vllm_b70")
    for module in (layers, linears, settled):
        monkeypatch.setattr(module, "current", lambda: Settings(linear="auto"))
    layers.take_waiting()
    scheduler = types.SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=64)
    config = types.SimpleNamespace(
        scheduler_config=scheduler,
        speculative_config=types.SimpleNamespace(num_speculative_tokens=3),
        parallel_config=types.SimpleNamespace(rank=0, tensor_parallel_size=1),
        additional_config={},
    )
    made = []
    for columns in (COLUMNS, 64):
        layer = torch.nn.Module()
        layer.prefix = f"layer.{columns}"
        weight = torch.randn(columns, DEPTH, device=DEVICE).bfloat16()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.quant_method = RowInvariantLinearMethod.__new__(RowInvariantLinearMethod)
        layer.quant_method.process_weights_after_loading(layer)
        made.append(layer)
    linears.settle([], config)
    print("\n" + "\n".join(r.getMessage() for r in caplog.records))
    assert len(config.additional_config[linears.FIELD]) == 2
    x = rows(320)
    for layer in made:
        apply = layer.quant_method.apply
        whole = apply(layer, x)
        assert [n for n in range(1, 321, 3) if differing(apply(layer, x[:n]), whole[:n])] == []
