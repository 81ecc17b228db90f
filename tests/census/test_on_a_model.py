"""The census of a loaded model on the CPU: unbroken it passes, and no planted fault gets by."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from vllm_b70.checkpoints.tiny import make_tiny

OPS = {
    "linear", "lm_head", "int4_linear", "gated_rms_norm", "gemma_rms_norm", "add_gemma_rms_norm",
    "silu_and_mul", "norms_and_rotary", "attention", "gated_delta_net", "sampler",
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    model = tmp_path_factory.mktemp("census") / "model"
    make_tiny(model, format="ct", shape="9b")
    script = Path(__file__).with_name("on_a_model.py")
    run = subprocess.run(
        [sys.executable, str(script), str(model), "cpu", "20", "1"],
        # One thread: two of them wait for one another wherever the machine is busy.
        env=os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [line[7:] for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert run.returncode == 0, run.stderr[-3000:]
    (calls,) = [line[7:] for line in run.stdout.splitlines() if line.startswith("WARMED ")]
    return [json.loads(line) for line in lines] + [
        {"case": "warmed", "op": op, "calls": count} for op, count in json.loads(calls)
    ]


def of(results, case):
    return [result for result in results if result["case"] == case]


def test_every_op_on_the_path_is_exact(results):
    found = of(results, "unbroken")
    assert {result["op"] for result in found} == OPS
    assert [result for result in found if not result["exact"]] == []
    assert all(result["calls"] > 50 for result in found), "a census that asks little shows little"


def test_the_warm_up_has_every_op_and_those_of_the_draft_model(results):
    found = of(results, "warmed")
    assert {result["op"] for result in found} == OPS | {"draft_tokens"}
    assert all(result["calls"] >= 10 for result in found)


def test_it_passes_twenty_times_and_once_more_after_the_faults(results):
    again = of(results, "again")
    assert len(again) == 20 * len(of(results, "unbroken"))
    assert [result for result in again + of(results, "mended") if not result["exact"]] == []


def test_one_ulp_in_one_class_of_row_counts_is_caught_in_every_op(results):
    found = of(results, "ulp")
    assert {result["op"] for result in found} == OPS
    missed = [(r["op"], r["shape"], r["planted"]) for r in found if r["exact"]]
    assert missed == []


def test_what_stock_would_run_is_caught_where_it_differs(results):
    found = [(r["op"], r["exact"]) for r in of(results, "stock")]
    assert {op for op, _ in found} == {
        "linear", "lm_head", "int4_linear", "attention", "gated_delta_net"
    }  # fmt: skip
    assert ("gated_delta_net", True) not in found
    for op in ("linear", "int4_linear"):
        if all(exact for name, exact in found if name == op):
            pytest.skip(f"BLAS is row-invariant on this CPU at every shape of {op}")
