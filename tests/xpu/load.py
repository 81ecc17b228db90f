"""Run by test_auto_round.py on the machine with two cards: the layers of a model and of its draft.

Prints which method each linear layer has, and a sum of what it holds.
"""

import hashlib
import json
import sys

import torch
from posing import Posing
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

PORT, *FOLDERS = sys.argv[1:]
torch.accelerator.empty_cache = torch.accelerator.max_memory_allocated = lambda: 0
library = torch.library.Library("_C", "FRAGMENT")
library.define("silu_and_mul(Tensor! out, Tensor x) -> ()")


def content(model):
    result = {}
    for name, layer in model.named_modules():
        if not hasattr(layer, "quant_method"):
            continue
        held = dict(layer.named_parameters(recurse=False)) | dict(
            layer.named_buffers(recurse=False)
        )
        digest = hashlib.sha256()
        for key in sorted(held):
            digest.update(key.encode() + held[key].detach().view(torch.uint8).numpy().tobytes())
        result[name] = [type(layer.quant_method).__name__, digest.hexdigest()]
    return result


started = False
for folder in FOLDERS:
    try:
        config = EngineArgs(
            model=folder, enforce_eager=True, max_model_len=512, max_num_seqs=4,
            enable_prefix_caching=False,
            speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        ).create_engine_config()  # fmt: skip
        with Posing(), set_current_vllm_config(config), torch.no_grad():
            if not started:
                init_distributed_environment(1, 0, f"tcp://127.0.0.1:{PORT}", 0, "gloo")
                initialize_model_parallel(1)
                started = True
            model = content(get_model(vllm_config=config))
            draft = config.speculative_config.draft_model_config
            draft = content(get_model(vllm_config=config, model_config=draft))
        result = {"quantization": config.model_config.quantization, "model": model, "draft": draft}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT", json.dumps(result), flush=True)
