"""Run by test_graphs.py on the machine with two cards: vLLM's V2 runner of an XPU captures a tiny
model and its drafter, every graph is verified, and faults planted in them are found.

What stands in: see forward.py; the graphs of recorder.py.
"""

import json
import sys
import types

import recorder
import torch
from forward import chunked, prepare
from posing import XPU, Posing
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs

from tests.graphs.plants import SEEN_IN, plants, replaced

MODEL, PORT, _ = sys.argv[1:]
#: Widths 3 and 2, and captured numbers of tokens of which some belong to one of them only.
SCHEDULE, SIZES = [[1, 1, 2], [2, 2, 1]], [2, 3, 4]
# vLLM's compiler passes name kernels that an XPU's vLLM has; nothing is compiled here.
passes = types.ModuleType("vllm.compilation.passes.pass_manager")
passes.PostGradPassManager = object
sys.modules[passes.__name__] = passes


def plan_cache(config, specs, memory):
    """What the engine makes of one worker's specs."""
    try:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    except ImportError:  # 0.33
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs

        groups = get_global_kv_cache_groups(config, [specs])
        (cache,) = get_kv_cache_configs(config, [specs], [memory], groups)
        cache.kv_cache_layout = config.cache_config.kv_cache_layout
        return cache
    (cache,) = get_kv_cache_configs(config, [specs], [memory])
    return cache


def make_runner(config):
    """The runner as the engine has it when it is about to capture."""
    from vllm.v1.attention.backends import utils
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.worker_base import get_current_attn_backends
    from vllm.v1.worker.workspace import init_workspace_manager
    from vllm.v1.worker.xpu_model_runner import XPUModelRunnerV2

    from vllm_b70.compat import fla_autotune
    from vllm_b70.graphs.worker import GraphsMixin
    from vllm_b70.layers import gated_delta_net_device

    class Worker:
        def _make_model_runner(self):
            return XPUModelRunnerV2(config, XPU)

    # It patches compiled kernels, which there are none of here.
    fla_autotune.apply = lambda: None
    gated_delta_net_device.chunk_gated_delta_rule_fwd = chunked
    # The host's memory is the device's.
    buffer_utils.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
    init_workspace_manager(XPU)
    runner = type("OurWorker", (GraphsMixin, Worker), {})()._make_model_runner()
    runner.load_model()
    register_all_kvcache_specs(config)
    specs = runner.get_kv_cache_spec()
    backends = get_current_attn_backends(config)
    layouts = [layout.name for layout in utils.get_supported_kv_cache_layouts(backends)]
    utils.resolve_kv_cache_layout(config, [layouts], specs.values())
    cache = plan_cache(config, specs, 2**30)
    config.cache_config.num_gpu_blocks = cache.num_blocks
    runner.initialize_kv_cache(cache)
    return runner


def refusal(runner):
    """The sentence of a capture that is refused; what it captured is thrown away."""
    from vllm_b70.graphs.verify import GraphError

    try:
        runner.capture_model()
    except GraphError as error:
        return str(error)
    finally:
        runner.cudagraph_manager.graphs.clear()
    return "accepted"


def waiting(forward):
    def forward_that_waits(*args, **kwargs):
        if torch.xpu.is_current_stream_capturing():
            torch.xpu.synchronize()
        return forward(*args, **kwargs)

    return forward_that_waits


def full_after(graphs):
    """A device with room for so many graphs."""
    begin, left = recorder.graph.__enter__, [graphs]

    def enter(self):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("XPU out of memory.\nTried to allocate 2 GiB")
        begin(self)

    return enter


def main():
    from vllm_b70.graphs import steps
    from vllm_b70.graphs.verify import GraphError, verify
    from vllm_b70.graphs.worker import leave_eager

    def names(found):
        return sorted(f"{d.run}: {d.part.whose}'s {d.part.what}" for d in found)

    prepare()
    recorder.install()
    config = EngineArgs(
        model=MODEL, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=128,
        enable_prefix_caching=False, num_gpu_blocks_override=64,
        compilation_config={"mode": 0, "cudagraph_capture_sizes": SIZES},
        speculative_config={
            "method": "mtp", "num_speculative_tokens": 2,
            "num_speculative_tokens_per_batch_size": SCHEDULE,
        },
    ).create_engine_config()  # fmt: skip
    with Posing(), set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{PORT}", 0, "gloo")
        initialize_model_parallel(1)
        runner = make_runner(config)
        model, result = runner.model, {"expected": SEEN_IN}
        with replaced(model, "forward", waiting(model.forward)):
            result["waits"] = refusal(runner)
        with replaced(recorder.graph, "__enter__", full_after(2)):
            result["full"] = refusal(runner)
        runner.capture_model()
        result["graphs"] = [
            sorted(
                (k.num_reqs, k.num_tokens, getattr(k, "num_speculative_tokens", 0)) for k in keys
            )
            for keys in steps.captured(runner)
        ]
        caches = [
            cache
            for layer in config.compilation_config.static_forward_context.values()
            for cache in (layer.kv_cache if isinstance(layer.kv_cache, tuple) else [layer.kv_cache])
        ]
        # Block 0 is where vLLM's own dummies write.
        result["left"] = sum(int(cache[1:].count_nonzero()) for cache in caches)
        rig = steps.Steps(runner, 2)
        run, other = (steps.StepRun(rig, steps.Case(*c)) for c in ((2, 2, 2), (1, 3, 2)))
        result["found"] = {"none": names(verify([run]))}
        # Other inputs for each: a buffer that nobody fills holds those of the step before.
        for seed, (name, plant) in enumerate(plants(runner, 2, 2).items()):
            with plant():
                # The fault of one size is not another's.
                runs = [run, other] if name == "ulp" else [run]
                result["found"][name] = names(verify(runs, seeds=(2 * seed + 2,)))
        run.prepare(0)
        got = run.replay()
        run.prepare(4)
        again = run.replay()
        result["finite"] = all(bool(value.isfinite().all()) for value in got.values())
        result["deaf"] = [part.what for part in got if torch.equal(got[part], again[part])]
        with replaced(runner.speculator.decode_cudagraph_manager, "_graphs_captured", False):
            try:
                verify([run])
            except GraphError as error:
                result["drafts without their graph"] = str(error)
        rig.close()
        leave_eager(runner.speculator)
        runner.speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
        runner.speculator.capture()
        result["drafter left eager"] = [len(keys) for keys in steps.captured(runner)]
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
