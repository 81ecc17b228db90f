import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeServer

from vllm_b70.harness.steps import TraceError, poll_running, read_trace


def line(number: int, requests: int, widths: dict[str, int], **more: Any) -> str:
    record = {"step": number, "requests": requests, "prompt_tokens": 0, "widths": widths}
    return json.dumps({**record, "preempted": 0, **more}) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        line(0, 1, {}, prompt_tokens=64)
        + line(1, 3, {"1": 1, "4": 2})
        + line(2, 1, {}, prompt_tokens=9, cuts=2)
        + line(3, 3, {"4": 3}, preempted=1)
        + line(4, 2, {"2": 2})
        + line(5, 2, {"2": 1, "1": 1})
        + line(6, 1, {"1": 1, "9": 0})
    )
    return path


def test_a_trace_becomes_a_histogram(trace: Path) -> None:
    steps = read_trace(trace)
    assert steps.requests == Counter({1: 3, 3: 2, 2: 2})
    assert steps.widths == Counter({4: 5, 1: 3, 2: 3, 9: 0})
    # 4, 4 (over a step of prompts), 2, 2, 1; a width without rows is no width.
    assert steps.width_changes == 2
    assert (steps.max_requests, steps.last_step) == (3, 6)
    assert (steps.preempted, steps.prompt_tokens, steps.cuts) == (1, 73, 2)
    assert "width changes 2" in str(steps)


def test_only_later_steps_are_read(trace: Path) -> None:
    steps = read_trace(trace, after_step=3)
    assert steps.requests == Counter({2: 2, 1: 1})
    assert steps.width_changes == 1
    assert read_trace(trace, after_step=6).last_step == -1


def test_an_empty_trace_has_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("")
    steps = read_trace(path)
    assert (steps.max_requests, steps.last_step, steps.width_changes) == (0, -1, 0)


def test_a_torn_last_line_is_ignored(trace: Path) -> None:
    whole = read_trace(trace)
    text = trace.read_text()
    for cut in range(1, len(line(7, 2, {"1": 2})) - 1):
        trace.write_text(text + line(7, 2, {"1": 2})[:cut])
        assert read_trace(trace) == whole


def test_a_last_line_without_its_line_end_counts_when_it_is_whole(trace: Path) -> None:
    trace.write_text(trace.read_text() + line(7, 2, {"1": 2}).rstrip("\n"))
    assert read_trace(trace).last_step == 7


@pytest.mark.parametrize(
    "bad",
    [
        '{"step": 1',
        "[]",
        line(1, -1, {}).strip(),
        line(1, 1, {"x": 1}).strip(),
        line(1, 1, {"1": -1}).strip(),
        line(1, 1, {}, step=1.5).strip(),
        line(1, 1, {}, preempted=None).strip(),
        line(1, 1, {}, cuts="2").strip(),
        '{"step": 1, "requests": 1, "prompt_tokens": 0, "preempted": 0}',
    ],
)
def test_other_malformed_lines_are_errors_with_their_number(trace: Path, bad: str) -> None:
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([*lines[:2], bad, *lines[2:]]) + "\n")
    with pytest.raises(TraceError, match="line 3"):
        read_trace(trace)


def test_a_malformed_last_line_with_its_line_end_is_not_torn(trace: Path) -> None:
    trace.write_text(trace.read_text() + "oops\n")
    with pytest.raises(TraceError, match="line 8"):
        read_trace(trace)


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "missing")


def test_the_gauge_is_sampled(fake: Callable[..., FakeServer]) -> None:
    server = fake(gauge=5)

    async def run() -> int:
        async with poll_running(server.base_url, interval=0.0) as steps:
            while not steps.requests:
                await asyncio.sleep(0)
        return steps.max_requests

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 5


def test_a_dead_server_gives_no_samples(free_port: int) -> None:
    async def run() -> int:
        async with poll_running(f"http://127.0.0.1:{free_port}", interval=0.0) as steps:
            for _ in range(50):
                await asyncio.sleep(0)
        return steps.max_requests

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 0


def test_the_schedulers_own_trace_is_understood(tmp_path: Path) -> None:
    from vllm_b70.scheduling.step_trace import Step, StepTrace

    path = tmp_path / "trace.jsonl"
    writer = StepTrace(path)
    writer.write(Step(requests=1, prompt_tokens=64, cuts=1))
    writer.write(Step(requests=3, widths=Counter({4: 2, 1: 1}), preempted=1))
    steps = read_trace(path)
    assert steps.requests == Counter({1: 1, 3: 1})
    assert steps.widths == Counter({4: 2, 1: 1})
    assert (steps.prompt_tokens, steps.cuts, steps.preempted, steps.last_step) == (64, 1, 1, 1)
