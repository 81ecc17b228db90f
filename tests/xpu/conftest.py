"""Processes that believe in two B70s (``stubs/sitecustomize.py``); models of the real widths."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

STUBS = Path(__file__).parent / "stubs"
ROOT = Path(__file__).parents[2]


def environment(**changes: str) -> dict[str, str]:
    """The variables of a process on the machine with two cards."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_B70")}
    # Another vLLM's Python files, from scripts/vllm_sources.sh, stand before the installed ones.
    sources = os.environ.get("XPU_STUB_SOURCES", "")
    path = os.pathsep.join(filter(None, [sources, str(STUBS), str(STUBS.parent), str(ROOT)]))
    return kept | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "INFO"} | changes


@pytest.fixture(scope="session")
def on_xpu():
    """Runs a script there."""
    return run


def run(script: str, *arguments: object, timeout: int = 400, **changes: str):
    """What a script on the machine with two cards prints after ``RESULT``, and all that it says."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line[:7] == "RESULT "]
    return results, done.stdout + done.stderr


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Folders ``9b`` and ``27b``: configurations of the real widths, and of the weights as much as
    the checks of the file want to see: an INT4 module and an MTP head."""
    from vllm_b70.checkpoints import tiny
    from vllm_b70.checkpoints.pack import pack_compressed_tensors, pack_gptq, quantize

    real = dict(linear_key_heads=16, head_dim=256, linear_head_dim=128, kv_heads=4)
    real |= dict(vocab=248320, max_positions=262144)
    widths = {
        "9b": dict(heads=16, linear_value_heads=32, intermediate=12288, hidden=4096, layers=32),
        "27b": dict(heads=24, linear_value_heads=48, intermediate=17408, hidden=5120, layers=64),
    }
    folder = tmp_path_factory.mktemp("models")
    weight = quantize(torch.ones(128, 128), group_size=128)
    with pytest.MonkeyPatch.context() as patch:
        for shape, packing, pack in (
            ("9b", "ct", pack_compressed_tensors),
            ("27b", "gptq", pack_gptq),
        ):
            patch.setitem(tiny.SHAPES, shape, tiny.TinyShape(**real, **widths[shape]))
            config = tiny._config(packing, shape, True, 128, True, "bfloat16", False)
            (folder / shape).mkdir()
            (folder / shape / "config.json").write_text(json.dumps(config))
            module = {f"model.layers.0.mlp.up_proj.{k}": v for k, v in pack(weight).items()}
            save_file(
                module | {"mtp.norm.weight": torch.ones(8)}, folder / shape / "model.safetensors"
            )
    return folder
