"""vLLM's V2 way of loading a draft model, on tiny checkpoints: what it builds and shares."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")
from vllm_b70.checkpoints.tiny import make_tiny

# A fork a checkpoint: importing vLLM is what takes the time.
SCRIPT = """
import json, os, sys, tempfile
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm_b70.checkpoints.pack import quantize

torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does

def look(model):
    config = EngineArgs(
        model=model, max_model_len=512, enable_prefix_caching=False, enforce_eager=True,
        kv_cache_memory_bytes=2**28,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
    ).create_engine_config()
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, "gloo")
        initialize_model_parallel(1, 1)
        target = get_model(vllm_config=config)
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        before, head = target.compute_logits(x), target.lm_head
        address, weight = head.weight.data_ptr(), head.weight.data
        draft = load_eagle_model(target, config)
        logits = draft.compute_logits(x)
        dense = quantize(weight, 128, scale_dtype=weight.dtype).dequantize()
        return {
            "class": type(draft).__name__,
            "shared": draft.lm_head is target.lm_head is head
            and head.weight.data_ptr() == address,
            "target": torch.equal(target.compute_logits(x), before),
            "int4": torch.allclose(logits.float(), x.float() @ dense.t(), rtol=0.01, atol=0.01),
            "same": torch.equal(logits, before),
            "top": torch.equal(draft.get_top_tokens(x), logits.argmax(-1)),
            "tied": address == target.model.embed_tokens.weight.data_ptr(),
            "linears": sorted({type(m.quant_method).__name__ for m in draft.model.modules()
                               if type(m).__name__.endswith("Linear")}),
        }

for model in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            result = look(model)
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        print("RESULT", json.dumps([model, result]), flush=True)
        os._exit(0)
    os.wait()
"""

#: Layout and shape of the checkpoint, whether the head is tied, and the draft model's linears.
CASES = {
    "9b": ("ct", "9b", False, ["DraftLinearMethod"]),
    "tied": ("ct", "9b", True, ["DraftLinearMethod"]),
    "27b": ("gptq", "27b", False, ["AutoGPTQLinearMethod", "DraftLinearMethod"]),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    for name, (layout, shape, tied, _) in CASES.items():
        make_tiny(folder / name, format=layout, shape=shape)
        if tied:
            file, weights = folder / name / "config.json", folder / name / "model.safetensors"
            config = json.loads(file.read_text()) | {"tie_word_embeddings": True}
            file.write_text(json.dumps(config))
            tensors = load_file(weights)
            del tensors["lm_head.weight"]
            save_file(tensors, weights)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_B70")}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *(str(folder / name) for name in CASES)],
        env=environ | {"VLLM_B70": "1", "VLLM_B70_DRAFT_LAYER": "int4"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [line[7:] for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(CASES), run.stderr[-3000:]
    return {os.path.basename(model): result for model, result in map(json.loads, lines)}


@pytest.mark.parametrize("name", CASES)
def test_a_draft_model_as_the_v2_runner_loads_it(results, name):
    _, _, tied, linears = CASES[name]
    expected = dict(shared=True, target=True, int4=True, same=False, top=True, tied=tied)
    assert results[name] == expected | {"class": "DraftModel", "linears": linears}
