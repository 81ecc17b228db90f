"""Counts of draft depths: kept by the scheduler, shown by Prometheus in the API server's process.

vLLM sends the scheduler's statistics from one process to the other in a dataclass of its own. The
one open mapping in it is of names to integers, ``num_kv_fetch_reqs_by_stage``, whose readers ask
for names they know; the counts of a step travel there under names of ours and are taken out on
arrival. Standard library and prometheus_client only.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

PREFIX = "vllm_b70:"

#: Each counter, its labels besides the model and the engine, and its help text.
COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "draft_depth_steps": (
        ("depth", "why"),
        "Steps by draft tokens for each request, and why so many: 'schedule' for this number of "
        "requests, 'fixed' without a schedule, 'blocks' when drafts that had been made were cut "
        "because state slots were short.",
    ),
    "drafts": (("depth",), "Drafts verified, by their draft tokens."),
    "accepted_draft_tokens": (
        ("depth", "position"),
        "Draft tokens accepted, by the draft tokens of their draft and the place in it, from 0.",
    ),
    "draft_layer_skipped_steps": ((), "Steps that left the draft layer out."),
    "draft_layer_caught_up_steps": ((), "Steps that replayed what earlier ones had left out."),
}


class DepthCounts:
    """What the scheduler counted since it last sent its statistics."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, *labels: object, count: int = 1) -> None:
        """Count; ``labels`` in the order of ``COUNTERS``."""
        assert len(labels) == len(COUNTERS[name][0]), name
        self._counts["|".join([PREFIX + name, *map(str, labels)])] += count

    def send(self, mapping: MutableMapping[str, int]) -> None:
        """Put the counts into ``mapping`` and start anew."""
        mapping.update(self._counts)
        self._counts.clear()


def receive(mapping: MutableMapping[str, int]) -> list[tuple[str, tuple[str, ...], int]]:
    """Take our counts out of ``mapping``: name, labels and count of each."""
    ours = [key for key in mapping if key.startswith(PREFIX)]
    counts = []
    for key in ours:
        name, *labels = key.removeprefix(PREFIX).split("|")
        counts.append((name, tuple(labels), mapping.pop(key)))
    return counts


@functools.cache
def _prometheus() -> dict[str, Any]:
    """The counters of this process; a name may be registered once only."""
    from prometheus_client import Counter as PrometheusCounter

    return {
        name: PrometheusCounter(PREFIX + name, text, ["model_name", "engine", *labels])
        for name, (labels, text) in COUNTERS.items()
    }


class DepthMetrics:
    """The Prometheus counters of one server, registered when it is made.

    Args:
        model_name: The served model's name, a label as in vLLM's metrics.
    """

    def __init__(self, model_name: str) -> None:
        self._model, self._counters = model_name, _prometheus()

    def observe(self, mapping: MutableMapping[str, int], engine: int) -> None:
        """Take our counts out of ``mapping`` and add them."""
        for name, labels, count in receive(mapping):
            self._counters[name].labels(self._model, str(engine), *labels).inc(count)
