"""Loads a checkpoint as a server's worker does and lets the census judge it, broken in many ways.

Run by the tests in a process of its own, because the plugin must be on before vLLM is imported:

    python on_a_model.py MODEL DEVICE REPEATS PLANTS    # prints lines "RESULT {json}"
"""

import contextlib
import functools
import json
import os
import sys
import time
from dataclasses import replace

os.environ |= {"VLLM_B70": "1", "VLLM_B70_CENSUS": "off"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import torch.nn.functional as F
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

MTP = {"method": "mtp", "num_speculative_tokens": 3}
#: Row counts that a planted fault changes: one class of at most 16, which is not the largest.
CLASSES = [range(5, 9), range(2, 3), range(9, 25)]


def load(model, **options):
    """The worker of a model, loaded in this process, and its configuration."""
    options = {
        "max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 512,
        "enforce_eager": True, "enable_prefix_caching": False, "kv_cache_memory_bytes": 2**28,
        "speculative_config": MTP,
    } | options  # fmt: skip
    config = EngineArgs(model=model, **options).create_engine_config()
    return UniProcExecutor(config).driver_worker.worker, config


def say(case, verdict, **more):
    print("RESULT", json.dumps({"case": case} | verdict.as_dict() | more), flush=True)


def ulp(function, rows):
    """The function, one value one unit in the last place off where a call has so many rows."""

    def planted(*args, **kwargs):
        out = function(*args, **kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if len(tensors[0]) in rows:
            results = out if isinstance(out, tuple) else (out,)
            # What returns nothing, or its buffer, fills an argument.
            shift(next((t for t in results if isinstance(t, torch.Tensor)), None), tensors)
        return out

    return planted


def shift(result, tensors):
    result = tensors[-1] if result is None else result
    kind = torch.int16 if result.element_size() == 2 else torch.int32
    result[len(result) // 2].view(-1)[:1].view(kind).add_(1)


@contextlib.contextmanager
def put(*places):
    """Other objects in some places, (owner, name, object), for a while."""
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def modules(models, *names):
    return [
        module
        for model in models
        for module in model.modules()
        if any(base.__name__ in names for base in type(module).__mro__)
    ]


def installed(models, probe):
    """Where the implementation that a probe must call is installed: (owner, name) pairs."""
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
    from vllm.v1.sample.sampler import Sampler

    from vllm_b70.layers import gated_delta_net as gdn

    cpu = probe.device.type == "cpu"
    ops = torch.ops.vllm_b70
    if probe.op in ("linear", "lm_head"):
        return [(ops, "linear" if cpu else "gemm")]
    if probe.op == "int4_linear":
        return [(ops, "int4_linear" if cpu else "int4_gemm")]
    if probe.op == "gated_rms_norm":
        return [(ops, "gated_rms_norm")]
    if probe.op in ("gemma_rms_norm", "add_gemma_rms_norm"):
        return [(m, "_forward_method") for m in modules(models, "GemmaRMSNorm")]
    if probe.op == "silu_and_mul":
        return [(m, "_forward_method") for m in modules(models, "SiluAndMul")]
    if probe.op == "norms_and_rotary":
        return [(Qwen3NextAttention, "_project_qkv_gate")]
    if probe.op == "attention":
        return [(type(m.impl), "forward") for m in modules(models, "Attention")[:1]]
    if probe.op == "gated_delta_net":
        if cpu:
            return [(gdn, "run_recurrent")]
        from vllm_b70.layers import gated_delta_net_device as device

        return [(device, "recurrent_steps")]
    assert probe.op == "sampler", probe.op
    if cpu:
        return [(Sampler, "compute_logprobs")]
    from vllm.v1.worker.gpu.sample import logprob

    return [(logprob, "compute_topk_scores")]


def shrunk(probe, rows):
    """The probe with few row counts or requests, so that it can be asked often."""
    if hasattr(probe, "rows"):
        return replace(probe, rows=min(probe.rows, rows))
    return replace(probe, requests=min(probe.requests, max(2, rows // 16)))


def stock(models, probe, config):
    """What stock vLLM would run in the op's place, or its like: name and places."""
    if probe.device.type != "cpu":
        from stock_gpu import stock as stock_gpu

        return stock_gpu(models, probe, config)
    from vllm_b70.layers import cpu_attention
    from vllm_b70.layers import gated_delta_net as gdn

    ops = torch.ops.vllm_b70
    if probe.op in ("linear", "lm_head"):
        dense = functools.cache(lambda w: w.t().contiguous())
        return "F.linear", [(ops, "linear", lambda x, w, bias: F.linear(x, dense(w), bias))]
    if probe.op == "int4_linear":
        return "dequantise and BLAS", [(ops, "int4_linear", ops.int4_linear_naive)]
    if probe.op == "attention":

        def whole(starts, lens, in_prompt, grid=64):
            import numpy as np

            return np.array(starts, np.int32), np.array(lens, np.int32), np.arange(len(lens))

        return "requests whole", [(cpu_attention, "cut_rows", whole)]
    if probe.op == "gated_delta_net":
        original = gdn.run_recurrent

        def rounded(layer, plan, *args):
            out = original(layer, plan, *args)
            layer.kv_cache[1].copy_(layer.kv_cache[1].bfloat16())
            return out

        return "a rounded state", [(gdn, "run_recurrent", rounded)]
    # The others are vLLM's own, or differ from it only with more threads than a test may take.
    return None


def settled(config):
    """The block size that will be served, which the executor has settled; asking again keeps it."""
    from vllm.platforms import current_platform

    cache = config.cache_config
    served = cache.block_size, cache.mamba_page_size_padded
    current_platform.update_block_size_for_backend(config)
    assert (cache.block_size, cache.mamba_page_size_padded) == served
    return cache.block_size


def warmed_up(worker, config, probes):
    """How often the warm-up of a GPU's worker would call each op; raises where a call fails."""
    from vllm_b70.census.path import find_of_draft
    from vllm_b70.census.warm_up import launch

    runner = worker.model_runner
    drafter = getattr(runner, "speculator", None) or runner.drafter
    probes = [*probes, *find_of_draft(drafter.model, config, worker.device)]
    # What draws the drafts is a leaf that no probe of the census knows.
    calls = [(probe.op, launch(probe, 32)) for probe in probes if probe.op != "DraftHead"]
    print("WARMED", json.dumps(calls), flush=True)


def main(model, device, repeats, plants):
    from vllm_b70.census.path import find

    begun = time.perf_counter()
    options = {} if device == "cpu" else {
        "gpu_memory_utilization": 0.2, "max_num_seqs": 64,
        "max_num_batched_tokens": 8192, "max_model_len": 4096,
    }  # fmt: skip
    worker, config = load(model, **options)
    assert worker.device.type == device
    models = [worker.get_model()]
    with torch.inference_mode(), set_current_vllm_config(config):
        probes = find(models, config, worker.device)
        block = settled(config)
        for probe in probes:
            if probe.op == "attention":
                assert f" block {block} " in probe.shape
                # A request of the longest stream goes on into a second block.
                assert block < probe.prompts[-1] + 24 and probe.prompts[-1] % block
        warmed_up(worker, config, probes)
        print("LOADED", round(time.perf_counter() - begun, 1), flush=True)
        # Twice: the first time kernels are compiled.
        for case in ("unbroken", "warm"):
            for probe in probes:
                say(case, probe.judge())
        for probe in probes:
            for _ in range(repeats):
                say("again", shrunk(probe, 24).judge())
        for probe in probes if plants else []:
            places = installed(models, probe)
            assert places, probe.op
            for rows in CLASSES:
                planted = [(o, n, ulp(getattr(o, n), rows)) for o, n in places]
                with put(*planted):
                    say("ulp", shrunk(probe, 64).judge(), planted=[rows[0], rows[-1]])
            replaced = stock(models, probe, config)
            if replaced is not None:
                with put(*replaced[1]):
                    say("stock", probe.judge(), planted=replaced[0])
        for probe in probes:
            say("mended", shrunk(probe, 64).judge())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
