import prometheus_client
import pytest

from vllm_b70.harness import metrics
from vllm_b70.harness.client import ResponseError
from vllm_b70.harness.metrics import SpeculationSnapshot


def exposition(engines: list[tuple[int, int, list[int]]]) -> str:
    """The text that vLLM's counters give; one (drafts, draft tokens, accepted) an engine."""
    registry = prometheus_client.CollectorRegistry()
    names = ["model_name", "engine"]
    counters = [
        prometheus_client.Counter(f"vllm:spec_decode_num_{name}", "", names, registry=registry)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    positions = prometheus_client.Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "",
        [*names, "position"],
        registry=registry,
    )
    running = prometheus_client.Gauge("vllm:num_requests_running", "", names, registry=registry)
    info = prometheus_client.Gauge("vllm:cache_config_info", "", ["block_size"], registry=registry)
    info.labels("528").set(1)
    for engine, (drafts, tokens, accepted) in enumerate(engines):
        for counter, value in zip(counters, (drafts, tokens, sum(accepted)), strict=True):
            counter.labels("tiny", str(engine)).inc(value)
        for position, count in enumerate(accepted):
            positions.labels("tiny", str(engine), str(position)).inc(count)
        running.labels("tiny", str(engine)).set(engine + 2)
    return prometheus_client.generate_latest(registry).decode()


def test_counters_of_all_engines_are_added_up() -> None:
    snapshot = metrics.parse_speculation(exposition([(10, 30, [6, 3, 1]), (5, 15, [2, 1, 0])]))
    assert snapshot == SpeculationSnapshot(15, 45, 13, {0: 8, 1: 4, 2: 1})


def test_acceptance_is_that_between_the_snapshots() -> None:
    before = metrics.parse_speculation(exposition([(10, 30, [6, 3, 1])]))
    after = metrics.parse_speculation(exposition([(30, 90, [16, 8, 1])]))
    acceptance = metrics.acceptance_between(before, after)
    assert (acceptance.drafts, acceptance.draft_tokens, acceptance.accepted_tokens) == (20, 60, 15)
    assert acceptance.overall == 0.25
    assert acceptance.per_position == [0.5, 0.25, 0.0]


def test_no_speculation_is_none_and_not_zero() -> None:
    snapshot = metrics.parse_speculation(exposition([]))
    assert snapshot == SpeculationSnapshot()
    acceptance = metrics.acceptance_between(snapshot, snapshot)
    assert (acceptance.overall, acceptance.per_position) == (None, [])


def test_a_counter_that_went_down_is_refused() -> None:
    with pytest.raises(ValueError, match="restarted"):
        metrics.acceptance_between(SpeculationSnapshot(drafts=3), SpeculationSnapshot(drafts=2))


def test_gauges() -> None:
    text = exposition([(0, 0, []), (0, 0, [])])
    assert metrics.parse_running(text) == 5
    assert metrics.parse_block_size(text) == 528
    assert metrics.parse_running("") is None
    assert metrics.parse_block_size("") is None


def test_text_that_is_not_prometheus_is_an_error() -> None:
    with pytest.raises(ResponseError, match="not Prometheus"):
        metrics.parse_speculation("<html>sign in</html>")
