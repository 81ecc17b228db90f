"""The census on a GPU: real widths pass, one ulp and what stock runs do not; times are printed.

pytest tests/gpu/test_census.py -s
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("vllm", reason="needs vLLM's CUDA ops")

from vllm_b70.census.rows import RowProbe
from vllm_b70.checkpoints.tiny import make_tiny
from vllm_b70.ops import gemm

ROOT = Path(__file__).resolve().parents[2]
#: Ops whose stock form changes bits with the rows of a step at some of the shapes here. vLLM's
#: norms are asked too, and printed; nothing is known that they must fail.
STOCK = {"linear", "int4_linear", "attention", "gated_delta_net"}


def run(model, repeats, plants):
    script = ROOT / "tests" / "census" / "on_a_model.py"
    done = subprocess.run(
        [sys.executable, str(script), str(model), "cuda", str(repeats), str(int(plants))],
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = [json.loads(line) for line in lines]
    for case in ("unbroken", "warm"):
        seconds = sum(r["seconds"] for r in results if r["case"] == case)
        print(f"{model.name} {case}: {seconds:.1f} s")
    for r in results:
        if r["case"] in ("warm", "stock") or not r["exact"] and r["case"] != "ulp":
            shown = {k: r.get(k) for k in ("op", "shape", "planted", "seconds", "differs")}
            print(r["case"], *[str(v)[:70] for v in shown.values() if v], sep=" | ")
    said = [line for line in done.stdout.splitlines() if line.startswith("peer ")]
    assert done.returncode == 0, "\n".join([*said, done.stderr[-3000:]])
    return results


def inexact(results, *cases):
    return [r for r in results if r["case"] in cases and not r["exact"]]


@pytest.mark.parametrize("shape", ["9b", "27b"])
def test_the_models_widths_and_every_plant(shape, tmp_path):
    model = tmp_path / f"wide-{shape}"
    script = ROOT / "benchmarks" / "wide_checkpoint.py"
    command = [sys.executable, str(script), shape, str(model), "--layers", "4"]
    subprocess.run(command, check=True, timeout=300)
    results = run(model, 0, True)
    assert inexact(results, "unbroken", "warm", "mended") == []
    ulps = [r for r in results if r["case"] == "ulp"]
    missed = [(r["op"], r["shape"], r["planted"]) for r in ulps if r["exact"]]
    assert ulps and missed == []
    stock = {r["op"]: [] for r in results if r["case"] == "stock"}
    for r in results:
        if r["case"] == "stock":
            stock[r["op"]].append(r["exact"])
    assert {"gated_rms_norm", "gemma_rms_norm", "add_gemma_rms_norm", "lm_head"} | STOCK == set(
        stock
    )
    assert [op for op in STOCK if all(stock[op])] == [], "not caught at any shape"


@pytest.mark.parametrize(("layout", "shape"), [("ct", "9b"), ("gptq", "27b")])
def test_an_unbroken_run_passes_twenty_times(layout, shape, tmp_path):
    make_tiny(tmp_path / shape, format=layout, shape=shape)
    results = run(tmp_path / shape, 20, False)
    assert sum(r["case"] == "again" for r in results) >= 200
    assert inexact(results, "unbroken", "warm", "again") == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_whole_vocabulary(dtype):
    columns, depth = 248320, 4096
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(columns, depth, device=device, generator=generator).to(dtype)
    done = torch.zeros(gemm.counters(columns), dtype=torch.int32, device=device)

    def inputs(count, seed):
        random = torch.Generator(device).manual_seed(seed)
        return (torch.randn(count, depth, device=device, generator=random).to(dtype),)

    def run(x):
        return (torch.ops.vllm_b70.gemm(x, weight, None, done, 0),)

    probe = RowProbe(
        "lm_head", f"{columns}x{depth}", 320, columns * depth, 4 * columns, device, inputs, run
    )
    for _ in range(2):
        verdict = probe.judge()
        print(verdict)
        assert verdict.exact, verdict.differs
