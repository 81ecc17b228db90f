"""Captured graphs on CUDA: all sizes and depths pass, faults planted in them are found and named,
and no region that waits is captured. About a minute: one engine of graphs_engine.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("vllm", reason="needs vLLM's CUDA ops")

from vllm_b70.graphs.recording import guarded
from vllm_b70.graphs.verify import GraphError

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model = tmp_path_factory.mktemp("graphs") / "model"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("graphs_engine.py")), str(model)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-5000:]
    found = json.loads(lines[0]) | {"log": done.stdout + done.stderr}
    print(f"verified again in {found['seconds']:.2f} s: {found['shapes']}, {found['drafter']}")
    return found


def test_all_sizes_and_depths_pass(run):
    widths = {width for _, width in run["shapes"]}
    assert widths == {2, 4} and {(2, 4), (4, 2)} <= {tuple(shape) for shape in run["shapes"]}
    assert run["drafter"][0] == len(run["shapes"]) and run["drafter"][1] > 0
    assert "have the bits of eager steps" in run["log"]
    assert run["seconds"] < 15
    assert run["found"]["none"] == []


def test_faults_of_one_graph_are_found_in_it(run):
    assert len(run["expected"]) >= 5
    for name, part in run["expected"].items():
        found = run["found"][name]
        named = {line.partition(":")[0] for line in found}
        assert named == {"2 requests of 4 tokens (depth 3, then 3 drafts each)"}, (name, found)
        assert any(line.endswith(part) for line in found), (name, found)


def test_the_sentence(run):
    size = "2 requests of 4 tokens (depth 3, then 3 drafts each)"
    assert f"hidden states of the target (1 of 8 rows) for {size}" in run["sentence"]


def test_nothing_is_left_of_it(run):
    assert run["answers"] == run["answers again"]


def capture(region):
    graph, x = torch.cuda.CUDAGraph(), torch.ones(8, device=DEVICE)
    region(x)
    with guarded(DEVICE), torch.cuda.graph(graph):
        region(x)
    x.fill_(1)
    graph.replay()
    return x.sum().item()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.accelerator.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: x.copy_(torch.ones(8)),
    ],
)
def test_a_region_that_waits_is_refused_and_the_next_is_captured(wait):
    with pytest.raises(GraphError, match="would wait for the device"):
        capture(lambda x: wait(x.add_(1)))
    assert capture(lambda x: x.add_(1)) == 16
