"""Patch: vLLM's Prometheus logger also shows our counts of draft depths.

what      PrometheusStatLogger.__init__ and .record
why       the official seam, an entry point in vllm.stat_logger_plugins, acts where the plugin is
          off: vLLM 0.32 then logs it and keeps statistics in spite of --disable-log-stats
upstream  not reported yet
versions  0.32
remove    when an entry point may decline; tests/speculation/test_depth_counts.py fails then
"""

from __future__ import annotations

from typing import Any

from vllm_b70.compat.seams import require
from vllm_b70.speculation.depth_counts import DepthMetrics

_applied = False


def apply() -> None:
    """Wrap both methods; safe to call again. Nothing is registered before a logger is made."""
    global _applied
    if _applied:
        return
    require("prometheus_logger", "prometheus_record", "scheduler_stats", "make_stats")
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    make, record = PrometheusStatLogger.__init__, PrometheusStatLogger.record

    def __init__(self: Any, vllm_config: Any, engine_indexes: Any = None) -> None:
        make(self, vllm_config, engine_indexes)
        self.vllm_b70 = DepthMetrics(vllm_config.model_config.served_model_name)

    def record_depths(
        self: Any,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.vllm_b70.observe(scheduler_stats.num_kv_fetch_reqs_by_stage, engine_idx)
        record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    PrometheusStatLogger.__init__ = __init__  # type: ignore[method-assign]
    PrometheusStatLogger.record = record_depths  # type: ignore[method-assign]
    _applied = True
