"""Run by test_graphs.py on the machine with two cards: vLLM's V2 runner of an XPU captures a tiny
model and its drafter, and every graph is verified, in Triton's interpreter.

What stands in: see forward.py; the graphs of recorder.py.
"""

import json
import sys
import types

import torch
from forward import chunked, prepare
from posing import XPU, Posing
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs

MODEL, PORT, KERNEL_TESTS = sys.argv[1:]
# vLLM's compiler passes name kernels that an XPU's vLLM has; nothing is compiled here.
passes = types.ModuleType("vllm.compilation.passes.pass_manager")
passes.PostGradPassManager = object
sys.modules[passes.__name__] = passes


def main():
    import recorder

    prepare()
    recorder.install()
    config = EngineArgs(
        model=MODEL, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256,
        enable_prefix_caching=False, compilation_config={"mode": 0, "cudagraph_capture_sizes": [1, 2, 4]},
        speculative_config={
            "method": "mtp", "num_speculative_tokens": 1,
        },
        num_gpu_blocks_override=40,
    ).create_engine_config()  # fmt: skip
    with Posing(), set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{PORT}", 0, "gloo")
        initialize_model_parallel(1)
        from vllm.v1.attention.backends.utils import (
            get_supported_kv_cache_layouts,
            resolve_kv_cache_layout,
        )
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.worker.worker_base import get_current_attn_backends
        from vllm.v1.worker.workspace import init_workspace_manager
        from vllm.v1.worker.gpu import buffer_utils
        from vllm.v1.worker.xpu_model_runner import XPUModelRunnerV2

        from vllm_b70.compat import fla_autotune
        from vllm_b70.graphs.worker import GraphsMixin
        from vllm_b70.layers import gated_delta_net_device

        # It patches compiled kernels, which there are none of here.
        fla_autotune.apply = lambda: None
        # The host's memory is the device's.
        buffer_utils.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
        gated_delta_net_device.chunk_gated_delta_rule_fwd = chunked

        class Bare:
            def _make_model_runner(self):
                return XPUModelRunnerV2(config, XPU)

        init_workspace_manager(XPU)
        runner = type("Worker", (GraphsMixin, Bare), {})()._make_model_runner()
        runner.load_model()
        # What the engine does before it captures.
        register_all_kvcache_specs(config)
        specs = runner.get_kv_cache_spec()
        backends = get_current_attn_backends(config)
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(config, [layouts], specs.values())
        (cache,) = get_kv_cache_configs(config, [specs], [2**30])
        config.cache_config.num_gpu_blocks = cache.num_blocks
        runner.initialize_kv_cache(cache)
        print("captured", runner.capture_model())
        print([ (g.num_reqs,g.num_tokens) for g in runner.cudagraph_manager.graphs])


if __name__ == "__main__":
    main()
