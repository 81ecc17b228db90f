"""The policy on vLLM's configuration: what is set, and what is refused by name."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from vllm_b70.checkpoints.tiny import make_tiny

# One process for all cases: importing vLLM takes most of the time.
SCRIPT = """
import json, os, sys
from vllm.engine.arg_utils import EngineArgs
model, cases = sys.argv[1], json.loads(sys.argv[2])
for case in cases:
    environ = {name: os.environ.get(name) for name in case["environ"]}
    if "model" in case["arguments"]:
        folder = os.path.dirname(model)
        case["arguments"]["model"] = os.path.join(folder, case["arguments"]["model"])
    os.environ.update(case["environ"])
    try:
        config = EngineArgs(
            **{"model": model, "max_model_len": 512, "enable_prefix_caching": False,
               "kv_cache_memory_bytes": 2**28} | case["arguments"]
        ).create_engine_config()
        result = {
            "scheduler": str(config.scheduler_config.scheduler_cls),
            "worker": config.parallel_config.worker_cls,
            "ssm": config.cache_config.mamba_ssm_cache_dtype,
            "mode": config.compilation_config.mode.name,
            "split": os.environ["VLLM_CPU_ATTN_SPLIT_KV"],
            "policy": [vars(row) for row in type(
                __import__("vllm.platforms").platforms.current_platform).policy(config)],
        }
    except Exception as error:
        result = {"error": str(error)}
    for name, value in environ.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    os.environ.pop("VLLM_CPU_ATTN_SPLIT_KV", None)
    print("RESULT", json.dumps(result), flush=True)
"""

MTP = {"method": "mtp", "num_speculative_tokens": 3}
ACCEPTED = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "speculation": {"speculative_config": MTP},
    "schedule": {
        "speculative_config": MTP
        | {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 1], [9, 64, 0]]}
    },
}
SKIPPING = ACCEPTED["schedule"]
REFUSED = {
    "worker under a schedule": (
        SKIPPING | {"worker_cls": "vllm.v1.worker.worker_base.WorkerBase"},
        {"VLLM_B70_CENSUS": "off"},
        "--worker-cls vllm.v1.worker.worker_base.WorkerBase",
    ),
    "prefix caching": ({"enable_prefix_caching": True}, {}, "prefix caching"),
    "batch invariant": ({}, {"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT=1"),
    "two LoRA streams": (
        {},
        {"VLLM_LORA_ENABLE_DUAL_STREAM": "1"},
        "VLLM_LORA_ENABLE_DUAL_STREAM=1",
    ),
    "kv dtype": ({"kv_cache_dtype": "fp8"}, {}, "--kv-cache-dtype fp8"),
    "kv dtype of another model": ({"kv_cache_dtype": "float16"}, {}, "--kv-cache-dtype float16"),
    "dual-batch overlap": ({"enable_dbo": True}, {}, "dual-batch overlap"),
    "kv offloading": ({"kv_offloading_size": 1.0}, {}, "--kv-offloading-size 1.0"),
    "model impl": ({"model_impl": "transformers"}, {}, "--model-impl transformers"),
    "ssm dtype": ({"mamba_ssm_cache_dtype": "bfloat16"}, {}, "--mamba-ssm-cache-dtype bfloat16"),
    "head dtype": ({"hf_overrides": {"head_dtype": "float32"}}, {}, "head_dtype float32"),
    "float16": ({"dtype": "float16"}, {}, "--dtype float16"),
    "split kv": ({}, {"VLLM_CPU_ATTN_SPLIT_KV": "1"}, "VLLM_CPU_ATTN_SPLIT_KV=1"),
    "pipeline": ({"pipeline_parallel_size": 2}, {}, "--pipeline-parallel-size 2"),
    "tensor": ({"tensor_parallel_size": 2}, {}, "--tensor-parallel-size 2"),
    "v2 runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "V2"),
    "worker": (
        {"worker_cls": "vllm.v1.worker.worker_base.WorkerBase"},
        {},
        "--worker-cls vllm.v1.worker.worker_base.WorkerBase",
    ),
    "scheduler": (
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        {},
        "--scheduler-cls",
    ),
    "budget": (
        {"max_num_seqs": 32, "max_num_batched_tokens": 95},
        {},
        "--max-num-batched-tokens 95",
    ),
    "budget with drafts": (
        {"max_num_seqs": 32, "max_num_batched_tokens": 191, "speculative_config": MTP},
        {},
        "needs a budget of 192",
    ),
    "scheduled tokens": (
        {"max_num_scheduled_tokens": 32},
        {},
        "--max-num-scheduled-tokens 32",
    ),
    "conv history": ({"mamba_cache_dtype": "float16"}, {}, "--mamba-cache-dtype float16"),
    "synthetic acceptance": (
        {
            "speculative_config": MTP
            | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
        },
        {},
        "synthetic",
    ),
    "another quantisation": ({"model": "BF16", "quantization": "fp8"}, {}, "--quantization fp8"),
    "no mtp head by its old name": (
        {"model": "NO_MTP", "speculative_config": MTP | {"method": "qwen3_5_mtp"}},
        {},
        "no MTP head",
    ),
    "float32": ({"dtype": "float32"}, {}, "--dtype float32"),
    "gapped schedule": (
        {
            "speculative_config": MTP
            | {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [9, 512, 0]]}
        },
        {},
        "nothing of 5 to 8 requests",
    ),
    "depth above the maximum": (
        {"speculative_config": MTP | {"num_speculative_tokens_per_batch_size": [[1, 512, 4]]}},
        {},
        "depth 4, outside 0 to num_speculative_tokens=3",
    ),
    "no mtp head": ({"model": "NO_MTP", "speculative_config": MTP}, {}, "no MTP head"),
    "no mtp tensors": ({"model": "LOST_MTP", "speculative_config": MTP}, {}, "no MTP head"),
    "damaged checkpoint": ({"model": "DAMAGED"}, {}, "model.safetensors has"),
    "ngram": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {},
        "ngram",
    ),
    "threshold": ({"long_prefill_token_threshold": 63}, {}, "--long-prefill-token-threshold 63"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    model = tmp_path_factory.mktemp("policy") / "model"
    make_tiny(model, format="ct", shape="9b")
    make_tiny(model.with_name("NO_MTP"), format="ct", shape="9b", mtp=False)
    make_tiny(model.with_name("BF16"), format="bf16", shape="9b")
    shutil.copytree(model.with_name("NO_MTP"), model.with_name("LOST_MTP"))
    shutil.copy(model / "config.json", model.with_name("LOST_MTP"))
    shutil.copytree(model, model.with_name("DAMAGED"))
    weights = model.with_name("DAMAGED") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    cases = [{"arguments": a, "environ": {}} for a in ACCEPTED.values()]
    cases += [{"arguments": a, "environ": e} for a, e, _ in REFUSED.values()]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_B70")}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), json.dumps(cases)],
        env=environ | {"VLLM_B70": "1", "VLLM_LOGGING_LEVEL": "INFO"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [line[7:] for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(cases), run.stderr[-3000:]
    names = [*ACCEPTED, *REFUSED]
    return dict(zip(names, map(json.loads, lines), strict=True)) | {"log": run.stdout + run.stderr}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_is_set_for_a_user_who_chose_nothing(results, case):
    result = results[case]
    assert "error" not in result, result
    assert result["scheduler"] == "vllm_b70.scheduling.scheduler.ChunkGridScheduler"
    assert result["ssm"] == "float32" and result["split"] == "0"
    rows = {row["setting"]: row["value"] for row in result["policy"]}
    assert rows["scheduler"] == "ChunkGridScheduler" and rows["prefix caching"] == "off"
    assert rows["census"] == "strict"
    assert all(row["why"] for row in result["policy"])


def test_every_worker_takes_the_census_and_only_a_schedule_with_depth_0_has_one_that_skips(results):
    names = {case: results[case]["worker"].removeprefix("vllm_b70.workers.") for case in ACCEPTED}
    every = dict.fromkeys(ACCEPTED, "CensusCpuWorker")
    assert names == every | {"schedule": "CensusSkippingCpuWorker"}


def test_what_catching_up_costs_is_in_the_table(results):
    rows = {
        case: {row["setting"]: row for row in results[case]["policy"]}.get("draft history")
        for case in ACCEPTED
    }
    assert [case for case, row in rows.items() if row] == ["schedule"]
    assert "259 positions of each of" in rows["schedule"]["why"]


def test_the_execution_mode_is_the_users(results):
    assert results["plain"]["mode"] == "DYNAMO_TRACE_ONCE"
    assert results["eager"]["mode"] == "NONE"


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_by_name(results, case):
    sentence = REFUSED[case][2]
    assert sentence in results[case].get("error", "accepted")


def test_the_table_is_shown_once(results):
    assert results["log"].count("vllm_b70: the deterministic route is on") == 1


@pytest.mark.parametrize(
    ("files", "index", "looked_at"),
    [
        (["config.json"], None, False),
        (["config.json", "model.safetensors"], None, True),
        (["config.json", "a.safetensors"], ["a.safetensors", "b.safetensors"], False),
        (["config.json", "a.safetensors", "b.safetensors"], ["a.safetensors"], True),
    ],
)
def test_a_hub_snapshot_is_looked_at_once_its_weights_are_there(
    tmp_path, monkeypatch, files, index, looked_at
):
    """At a first start the configuration is there and the weights are not: nothing is refused."""
    import huggingface_hub

    from vllm_b70.platform import _folder

    for name in files:
        (tmp_path / name).touch()
    if index is not None:
        weights = {f"tensor{i}": name for i, name in enumerate(index)}
        text = json.dumps({"weight_map": weights})
        (tmp_path / "model.safetensors.index.json").write_text(text)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *a, **k: str(tmp_path / "config.json")
    )
    assert _folder("someone/some-model", None) == (tmp_path if looked_at else None)
