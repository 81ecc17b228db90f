"""What vLLM is configured to for each recipe on one and two B70s, written out by hand; what is
refused there."""

import json

import pytest

pytest.importorskip("vllm")

#: One process for all cases: importing vLLM takes most of the time.
SCRIPT = """
import json, os, sitecustomize, sys
from vllm.engine.arg_utils import EngineArgs
from vllm_b70.settings import current
for case in json.loads(sys.argv[2]):
    case["model"] = os.path.join(sys.argv[1], case["model"])
    sitecustomize.machine(**case.pop("machine", {}))
    environ = case.pop("environ", {})
    os.environ.update(environ)
    current.cache_clear()
    try:
        c = EngineArgs(**{"enable_prefix_caching": False} | case).create_engine_config()
        from vllm.platforms import current_platform as platform
        compilation, cache, parallel = c.compilation_config, c.cache_config, c.parallel_config
        draft = c.speculative_config
        result = {
            "platform": type(platform).__name__,
            "communicator": platform.get_device_communicator_cls(),
            "quantization": c.model_config.quantization,
            "dtype": str(c.model_config.dtype),
            "worker": parallel.worker_cls,
            "v2 runner": c.use_v2_model_runner,
            "cards": parallel.tensor_parallel_size,
            "scheduler": c.scheduler_config.scheduler_cls,
            "budget": c.scheduler_config.max_num_batched_tokens,
            "mode": compilation.mode.name,
            "splitting_ops": compilation.splitting_ops,
            "compile_sizes": compilation.compile_sizes,
            "inductor": {k: v for k, v in compilation.inductor_compile_config.items()
                         if type(v) is bool},
            "graphs": compilation.cudagraph_mode.name,
            "sizes": compilation.cudagraph_capture_sizes,
            "ssm": cache.mamba_ssm_cache_dtype,
            "conv": cache.mamba_cache_dtype,
            "kv": cache.cache_dtype,
            "mamba": cache.mamba_cache_mode,
            "prefix caching": cache.enable_prefix_caching,
            "draft": draft and [draft.method, draft.num_speculative_tokens,
                                draft.num_speculative_tokens_per_batch_size,
                                draft.draft_model_config.quantization],
            "table": {row.setting: row.value for row in platform.policy(c)},
        }
    except Exception as error:
        result = {"error": str(error)}
    for name in environ:
        del os.environ[name]
    print("RESULT", json.dumps(result), flush=True)
"""

TO_64 = [1, 2, 3, 4, 5, 6, 8, 10, 15, 16, 20, 25, 30, 32, 40, 50, 60, 64]
SMALL = {
    "model": "9b",
    "dtype": "float16",
    "language_model_only": True,
    "max_model_len": 8192,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "compilation_config": {"cudagraph_capture_sizes": TO_64},
}
TWO = {"tensor_parallel_size": 2}
TO_320 = [*TO_64, 80, 100, 120, 160, 200, 240, 320]
LARGE = SMALL | TWO
LARGE |= {"model": "27b", "max_model_len": 512, "max_num_seqs": 128}
LARGE |= {"compilation_config": {"cudagraph_capture_sizes": TO_320}}
SCHEDULE = [[1, 8, 3], [9, 16, 1], [17, 64, 0]]


def mtp(depth, **more):
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": depth} | more}


SCHEDULED = mtp(3, num_speculative_tokens_per_batch_size=SCHEDULE)
RECIPES = {
    "9b": SMALL,
    "9b, MTP": SMALL | mtp(3),
    "9b, scheduled": SMALL | SCHEDULED,
    "9b, two cards": SMALL | TWO,
    "9b, two cards, MTP": SMALL | TWO | mtp(3),
    "9b, two cards, scheduled": SMALL | TWO | SCHEDULED,
    "27b, two cards": LARGE,
    "27b, two cards, MTP": LARGE | mtp(4),
    # Not of the mission: what a torch without graphs, and a user who chose nothing, get.
    "no graphs": SMALL | {"machine": {"graphs": False}, "compilation_config": {}},
    "graphs off": SMALL | {"environ": {"VLLM_B70_GRAPHS": "off"}, "compilation_config": {}},
    "target": SMALL | mtp(3) | {"environ": {"VLLM_B70_GRAPHS": "target"}},
    "sleep mode": SMALL | {"enable_sleep_mode": True, "compilation_config": {}},
}
RESOLVED = {
    "platform": "B70XpuPlatform",
    "communicator": "vllm_b70.layers.communicator.RankOrderXpuCommunicator",
    "quantization": "compressed-tensors",
    "dtype": "torch.float16",
    "worker": "vllm_b70.workers.CensusGraphsXpuWorker",
    "v2 runner": True,
    "cards": 1,
    "scheduler": "vllm_b70.scheduling.scheduler.AsyncChunkGridScheduler",
    "budget": 1024,
    "mode": "VLLM_COMPILE",
    "splitting_ops": [],
    "compile_sizes": [],
    "inductor": {
        "enable_auto_functionalized_v2": False,
        "combo_kernels": False,
        "benchmark_combo_kernel": False,
        "deterministic": True,
        "split_reductions": False,
        "benchmark_fusion": False,
    },
    "graphs": "FULL_DECODE_ONLY",
    "sizes": [1, 2, 3, 4, 5, 6, 8, 10, 15, 16, 20, 25, 30, 32, 40, 50, 60, 64],
    "ssm": "float32",
    "conv": "auto",
    "kv": "auto",
    "mamba": "none",
    "prefix caching": False,
    "draft": None,
}
RESOLVED_27B = {
    "quantization": "auto_gptq",
    "cards": 2,
    "sizes": [
        1, 2, 3, 4, 5, 6, 8, 10, 15, 16, 20, 25, 30, 32, 40, 50, 60, 64,
        80, 100, 120, 160, 200, 240, 320,
    ],
}  # fmt: skip
EXPECTED = {
    "9b": {},
    "9b, MTP": {"draft": ["mtp", 3, None, "compressed-tensors"]},
    "9b, scheduled": {
        "worker": "vllm_b70.workers.CensusGraphsSkippingXpuWorker",
        "draft": ["mtp", 3, [[1, 8, 3], [9, 16, 1], [17, 64, 0]], "compressed-tensors"],
    },
    "9b, two cards": {"cards": 2},
    "9b, two cards, MTP": {"cards": 2, "draft": ["mtp", 3, None, "compressed-tensors"]},
    "9b, two cards, scheduled": {
        "cards": 2,
        "worker": "vllm_b70.workers.CensusGraphsSkippingXpuWorker",
        "draft": ["mtp", 3, [[1, 8, 3], [9, 16, 1], [17, 64, 0]], "compressed-tensors"],
    },
    "27b, two cards": RESOLVED_27B,
    "27b, two cards, MTP": RESOLVED_27B | {"draft": ["mtp", 4, None, "auto_gptq"]},
    "no graphs": {"graphs": "NONE", "sizes": [], "worker": "vllm_b70.workers.CensusXpuWorker"},
    "graphs off": {"graphs": "NONE", "sizes": [], "worker": "vllm_b70.workers.CensusXpuWorker"},
    "target": {"draft": ["mtp", 3, None, "compressed-tensors"]},
    "sleep mode": {"graphs": "NONE", "sizes": [], "worker": "vllm_b70.workers.CensusXpuWorker"},
}
DECODES = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
#: name: what is asked for on which machine, and a part of the sentence.
REFUSED = {
    "no card": (TWO | {"machine": {"cards": 1}}, "without 2 cards: found 1 visible"),
    "Alchemist": (
        {"machine": {"name": "Intel(R) Arc(TM) A770", "has_subgroup_2d_block_io": False}},
        "matrix unit of xpu:0: found Intel(R) Arc(TM) A770 without has_subgroup_2d_block_io",
    ),
    "no matrix unit": (
        {"machine": {"has_subgroup_matrix_multiply_accumulate": False}},
        "without has_subgroup_matrix_multiply_accumulate",
    ),
    "subgroups of 32": ({"machine": {"sub_group_sizes": [32]}}, "sub_group_sizes 16"),
    "no triton": ({"machine": {"drivers": []}}, "without Triton for XPU"),
    "two tritons": (
        {"machine": {"drivers": ["intel", "nvidia"]}},
        "active drivers: intel, nvidia",
    ),
    "fusion": ({"machine": {"fusion": False}}, "without Triton's enable_fp_fusion"),
    "no xccl": (TWO | {"machine": {"xccl": False}}, "without communication between cards"),
    "three cards": (
        {"tensor_parallel_size": 4, "machine": {"cards": 4}},
        "--tensor-parallel-size 4: the sum over so many cards",
    ),
    "pipeline": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    "data": ({"data_parallel_size": 2}, "--data-parallel-size 2"),
    "context": ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2"),
    "graphs it has not got": (DECODES | {"machine": {"graphs": False}}, "found torch"),
    "graphs it has not got, by the switch": (
        {
            "machine": {"graphs": False},
            "compilation_config": {},
            "environ": {"VLLM_B70_GRAPHS": "all"},
        },
        "VLLM_B70_GRAPHS=all: found torch",
    ),
    "graphs and none": (
        {"enforce_eager": True, "environ": {"VLLM_B70_GRAPHS": "target"}},
        "VLLM_B70_GRAPHS=target: --enforce-eager asks for the opposite",
    ),
    "graphs in sleep mode": (DECODES | {"enable_sleep_mode": True}, "in sleep mode"),
    "piecewise": ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "PIECEWISE"),
    "offload": ({"cpu_offload_gb": 4}, "weights offloaded to the host"),
    "float32": ({"dtype": "float32"}, "--dtype float32"),
    "prefix caching": ({"enable_prefix_caching": True}, "prefix caching"),
    "kv dtype": ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    "v1 runner": ({"environ": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, "the V1 model runner"),
    "batch invariant": ({"environ": {"VLLM_BATCH_INVARIANT": "1"}}, "VLLM_BATCH_INVARIANT=1"),
}


@pytest.fixture(scope="module")
def results(models, on_xpu):
    cases = {**RECIPES, **{name: SMALL | case for name, (case, _) in REFUSED.items()}}
    results, log = on_xpu(SCRIPT, models, json.dumps(list(cases.values())), VLLM_B70="1")
    assert len(results) == len(cases), log[-3000:]
    return dict(zip(cases, results, strict=True)) | {"log": log}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(results, name):
    result = results[name]
    assert "error" not in result, result["error"]
    table = result.pop("table")
    assert result == RESOLVED | EXPECTED[name]
    assert table["cudagraph_mode"] == result["graphs"]
    captured = {"target": "target"}.get(name, "all")
    assert table["graphs"] == ("off" if result["graphs"] == "NONE" else captured)
    assert ("all-reduce" in table) == (result["cards"] == 2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(results, name):
    error = results[name].get("error", "accepted")
    assert REFUSED[name][1] in error and "VLLM_B70=1 cannot honour" in error


def test_the_caution_is_logged_once(results):
    assert results["log"].count("the exact route was never run on an XPU") == 1
    assert "docs/b70.md" in results["log"]


def test_the_server_stops_where_the_platform_is_not_an_xpu(on_xpu):
    """vLLM's own answer to a missing card is another platform, silently."""
    script = """
import sitecustomize
sitecustomize.machine(cards=0)
from vllm.plugins import load_general_plugins
load_general_plugins()
"""
    _, log = on_xpu(script, VLLM_B70="1")
    assert "VLLM_B70=1 but vLLM runs on UnspecifiedPlatform" in log


@pytest.mark.parametrize("there", ["1", "0"])
def test_native_linears_need_intels_int4_kernel(there, models, on_xpu):
    environ = {"VLLM_B70_LINEAR": "native", "XPU_STUB_INT4_GEMM": there, "VLLM_B70_CENSUS": "off"}
    (result,), log = on_xpu(SCRIPT, models, json.dumps([SMALL]), VLLM_B70="1", **environ)
    if there == "1":
        assert "error" not in result, result
        assert result["table"]["linears"] == "native"
        # It settles the routes, census or not.
        assert result["worker"] == "vllm_b70.workers.CensusGraphsXpuWorker"
    else:
        sentence = "cannot honour VLLM_B70_LINEAR=native: found vllm-xpu-kernels 0.1.16.2, no int4"
        assert sentence in result["error"]
