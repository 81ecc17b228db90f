"""Reads the server's Prometheus metrics: draft acceptance, running requests, KV block size.

The counters run from the server's start, so one run's acceptance is the difference of two
snapshots. Servers with several engines report one series each; the series are added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from vllm_b70.harness.client import ResponseError

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
RUNNING = "vllm:num_requests_running"
CACHE_CONFIG = "vllm:cache_config_info"


@dataclass(frozen=True)
class SpeculationSnapshot:
    """Counters of speculative decoding since the server started, all zero without speculation.

    Attributes:
        drafts: number of drafts (one request in one step with at least one draft token).
        draft_tokens: draft tokens proposed.
        accepted_tokens: draft tokens accepted.
        accepted_per_position: accepted draft tokens by position in the draft, from 0.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance between two snapshots.

    Attributes:
        drafts: drafts made.
        draft_tokens: draft tokens proposed.
        accepted_tokens: draft tokens accepted.
        overall: accepted share of the draft tokens, 0 to 1; None when nothing was drafted.
        per_position: for each draft position, accepted tokens per draft, 0 to 1. A schedule makes
            drafts of different lengths, so late positions then also count drafts without them.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    overall: float | None
    per_position: list[float]


def parse_speculation(text: str) -> SpeculationSnapshot:
    """Read the speculation counters from the text of ``/metrics``.

    Raises:
        ResponseError: the text is not Prometheus' text format.
    """
    totals = {DRAFTS: 0.0, DRAFT_TOKENS: 0.0, ACCEPTED_TOKENS: 0.0}
    per_position: dict[int, int] = {}
    for name, labels, value in _samples(text):
        if name in totals:
            totals[name] += value
        elif name == ACCEPTED_PER_POSITION:
            position = int(labels["position"])
            per_position[position] = per_position.get(position, 0) + int(value)
    return SpeculationSnapshot(
        drafts=int(totals[DRAFTS]),
        draft_tokens=int(totals[DRAFT_TOKENS]),
        accepted_tokens=int(totals[ACCEPTED_TOKENS]),
        accepted_per_position=per_position,
    )


def acceptance_between(before: SpeculationSnapshot, after: SpeculationSnapshot) -> Acceptance:
    """Return the acceptance of what ran between two snapshots of one server.

    Raises:
        ValueError: a counter went down: the snapshots are swapped or the server restarted.
    """
    drafts = after.drafts - before.drafts
    draft_tokens = after.draft_tokens - before.draft_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    if min(drafts, draft_tokens, accepted) < 0:
        raise ValueError("a speculation counter went down: the server was restarted in between")
    positions = range(max(after.accepted_per_position, default=-1) + 1)
    counts = [
        after.accepted_per_position.get(position, 0) - before.accepted_per_position.get(position, 0)
        for position in positions
    ]
    return Acceptance(
        drafts=drafts,
        draft_tokens=draft_tokens,
        accepted_tokens=accepted,
        overall=accepted / draft_tokens if draft_tokens else None,
        per_position=[count / drafts for count in counts] if drafts else [],
    )


def parse_running(text: str) -> int | None:
    """Return the number of running requests, or None when the gauge is absent.

    Raises:
        ResponseError: the text is not Prometheus' text format.
    """
    values = [value for name, _, value in _samples(text) if name == RUNNING]
    return int(sum(values)) if values else None


def parse_block_size(text: str) -> int | None:
    """Return the server's KV block size in tokens, or None when it is not reported.

    Raises:
        ResponseError: the text is not Prometheus' text format.
    """
    for name, labels, _ in _samples(text):
        if name == CACHE_CONFIG and labels.get("block_size", "").isdigit():
            return int(labels["block_size"])
    return None


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except ValueError as error:
        raise ResponseError(f"/metrics is not Prometheus text: {error}") from error
