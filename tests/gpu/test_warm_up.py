"""After the warm-up of a GPU's worker no step compiles a kernel of ours any more.

pytest tests/gpu/test_warm_up.py -s
"""

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

from vllm_b70.checkpoints.tiny import make_tiny

FOLDER = Path(__file__).resolve().parents[1] / "census"
SCRIPT = """
import importlib, json, pkgutil, sys
import on_a_model
import torch
from vllm.config import set_current_vllm_config
from triton.runtime.jit import JITFunction
import vllm_b70.kernels
from vllm_b70.census.path import find, find_of_draft

def compiled():
    found = {}
    for module in pkgutil.iter_modules(vllm_b70.kernels.__path__):
        loaded = sys.modules.get("vllm_b70.kernels." + module.name)
        for name, value in vars(loaded or object).items():
            if isinstance(value, JITFunction):
                # Of a device: its kernels first.
                caches = getattr(value, "device_caches", {})
                found[module.name + "." + name] = sum(len(c[0]) for c in caches.values())
    return found

options = {"gpu_memory_utilization": 0.2, "max_num_seqs": 64, "max_num_batched_tokens": 4096,
           "max_model_len": 4096}
worker, config = on_a_model.load(sys.argv[1], **options)
before = compiled()
with torch.inference_mode(), set_current_vllm_config(config):
    probes = find([worker.get_model()], config, worker.device)
    for probe in probes:
        probe.judge()
    draft = find_of_draft(worker.model_runner.speculator.model, config, worker.device)[-1]
    for rows in range(1, 65):
        draft.run(*draft.inputs(rows, 1))
after = compiled()
print("RESULT", json.dumps([before, {k: n for k, n in after.items() if n != before.get(k, 0)}]))
"""


def test_the_census_and_drafting_compile_nothing_after_it(tmp_path):
    make_tiny(tmp_path / "model", format="ct", shape="9b")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model")],
        env=os.environ | {"PYTHONPATH": f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line[7:] for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stderr[-3000:]
    before, more = json.loads(lines[0])
    print({name: count for name, count in before.items() if count})
    for name in ("attention.split", "attention.walk", "attention.merge", "norm.rms_norm",
                 "gated_delta_rule.advance", "causal_conv1d.prompts", "linear.split"):  # fmt: skip
        assert before[name], name
    assert more == {}
