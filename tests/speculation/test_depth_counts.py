"""The counts of depths arrive as Prometheus counters, and only where a logger was made."""

import subprocess
import sys

import pytest

from vllm_b70.speculation.depth_counts import PREFIX, DepthCounts, receive


def test_counts_travel_beside_what_is_vllms():
    counts, mapping = DepthCounts(), {"waiting_to_start": 2}
    counts.add("drafts", 3)
    counts.add("accepted_draft_tokens", 3, 0, count=2)
    counts.send(mapping)
    assert sorted(receive(mapping)) == [
        ("accepted_draft_tokens", ("3", "0"), 2),
        ("drafts", ("3",), 1),
    ]
    assert mapping == {"waiting_to_start": 2}


def test_labels_that_are_missing_are_noticed():
    with pytest.raises(AssertionError, match="drafts"):
        DepthCounts().add("drafts")


CHECK = """
import types, prometheus_client
from prometheus_client import REGISTRY, generate_latest
from vllm_b70.compat import depth_metrics
import vllm.v1.metrics.loggers as loggers
def make(self, vllm_config, engine_indexes=None): pass
def record(self, *a): self.recorded = a
loggers.PrometheusStatLogger.__init__, loggers.PrometheusStatLogger.record = make, record
depth_metrics.require = lambda *names: None
depth_metrics.apply(); depth_metrics.apply()
assert b"vllm_b70" not in generate_latest()
config = types.SimpleNamespace(model_config=types.SimpleNamespace(served_model_name="m"))
for _ in range(2):
    logger = loggers.PrometheusStatLogger(config)
    mapping = {"vllm_b70:drafts|3": 5, "in_progress": 1}
    stats = types.SimpleNamespace(num_kv_fetch_reqs_by_stage=mapping)
    logger.record(stats, "iteration", engine_idx=0)
    logger.record(None, None)
assert mapping == {"in_progress": 1}
print(generate_latest().decode())
"""


def test_vllms_logger_shows_them_under_our_names():
    pytest.importorskip("vllm")
    run = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert PREFIX + 'drafts_total{depth="3",engine="0",model_name="m"} 10.0' in run.stdout


def test_an_entry_point_would_still_act_where_the_plugin_is_off():
    """If this fails, an entry point of vllm.stat_logger_plugins can replace the patch."""
    pytest.importorskip("vllm")
    import inspect

    from vllm.v1.engine.async_llm import AsyncLLM

    assert "self.log_stats = log_stats or has_custom_loggers" in inspect.getsource(AsyncLLM)
