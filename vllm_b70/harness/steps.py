"""Histograms of engine steps: how many requests shared a step and how wide their rows were.

A load of 32 users proves something about 32 requests in a step only if such a step took place.
The server's scheduler writes one JSON object a step when ``VLLM_B70_STEP_TRACE`` names a file::

    {"step": 7, "requests": 9, "prompt_tokens": 64, "widths": {"1": 3, "4": 5}, "preempted": 0}

``widths`` counts the rows past their prompt by the number of tokens scheduled for them, so a
request that verifies three drafts has width 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from vllm_b70.harness.client import HarnessError, is_loopback, normalise_base_url
from vllm_b70.harness.metrics import parse_running


class TraceError(HarnessError):
    """A step trace that cannot be read; the message names the line."""


@dataclass
class StepHistogram:
    """What a run of engine steps held.

    Attributes:
        requests: requests in a step -> number of steps (of samples, for the fallback).
        widths: tokens scheduled for a row past its prompt -> number of such rows.
        width_steps: greatest width of a step -> number of steps with rows past their prompt.
        width_changes: how often the greatest width differed from that of the preceding step with
            such rows (steps with prompts only are passed over).
        preempted: preemptions.
        prompt_tokens: prompt tokens computed.
        cuts: prompt chunks that the chunk grid made shorter than the budget allowed.
        last_step: number of the last step read; -1 when there was none.
    """

    requests: Counter[int] = field(default_factory=Counter)
    widths: Counter[int] = field(default_factory=Counter)
    width_steps: Counter[int] = field(default_factory=Counter)
    width_changes: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cuts: int = 0
    last_step: int = -1

    @property
    def max_requests(self) -> int:
        """Most requests in one step; 0 when there was no step."""
        return max(self.requests, default=0)

    def __str__(self) -> str:
        return (
            f"requests per step {_counts(self.requests)}; "
            f"steps by width {_counts(self.width_steps)}; width changes {self.width_changes}; "
            f"preempted {self.preempted}; chunks cut {self.cuts}"
        )


def read_trace(path: Path, after_step: int = -1) -> StepHistogram:
    """Read the steps numbered above ``after_step``.

    A last line without a line end that is not valid JSON is a write in progress and is ignored.

    Raises:
        TraceError: the file cannot be read, or another line is malformed.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise TraceError(f"cannot read the step trace {path}: {error.strerror}") from error
    lines = text.split("\n")
    histogram = StepHistogram()
    previous_width: int | None = None
    for number, line in enumerate(lines, start=1):
        torn = number == len(lines)
        if not line.strip():
            continue
        try:
            step = _parse_step(line)
        except ValueError as error:
            if torn:
                break
            raise TraceError(f"{path}, line {number}: {error}") from error
        if step.number <= after_step:
            continue
        histogram.last_step = max(histogram.last_step, step.number)
        histogram.requests[step.requests] += 1
        histogram.widths.update(step.widths)
        histogram.preempted += step.preempted
        histogram.prompt_tokens += step.prompt_tokens
        histogram.cuts += step.cuts
        width = max((width for width, rows in step.widths.items() if rows), default=None)
        if width is not None:
            histogram.width_steps[width] += 1
            if previous_width is not None and width != previous_width:
                histogram.width_changes += 1
            previous_width = width
    return histogram


@dataclass(frozen=True)
class _Step:
    number: int
    requests: int
    prompt_tokens: int
    widths: dict[int, int]
    preempted: int
    cuts: int


def _parse_step(line: str) -> _Step:
    """Raise ValueError (of which JSONDecodeError is one) unless the line is one whole step."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("a step must be a JSON object")
    widths = record.get("widths")
    if not isinstance(widths, dict) or not all(key.isdigit() for key in widths):
        raise ValueError("'widths' must map token counts to row counts")
    return _Step(
        number=_count(record, "step"),
        requests=_count(record, "requests"),
        prompt_tokens=_count(record, "prompt_tokens"),
        widths={int(key): _count(widths, key) for key in widths},
        preempted=_count(record, "preempted"),
        # Only this project's scheduler has a grid, so a trace may come without it.
        cuts=_count(record, "cuts") if "cuts" in record else 0,
    )


def _count(record: dict[str, Any], key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key!r} must be a whole number from 0, not {value!r}")
    return value


def _counts(counter: Counter[int]) -> str:
    return "{" + ", ".join(f"{key}: {counter[key]}" for key in sorted(counter)) + "}"


@contextlib.asynccontextmanager
async def poll_running(base_url: str, interval: float = 0.1) -> AsyncIterator[StepHistogram]:
    """Sample the gauge of running requests every ``interval`` seconds while the body runs.

    The fallback for servers without a step trace: it can miss a short peak, and it counts
    requests that the engine holds, not those that shared a step. Widths stay empty. A sample
    that fails is skipped, for the load itself reports a dead server better.
    """
    url = normalise_base_url(base_url) + "/metrics"
    histogram = StepHistogram()

    async def sample(http: httpx.AsyncClient) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError, HarnessError):
                running = parse_running((await http.get(url)).text)
                if running is not None:
                    histogram.requests[running] += 1
            await asyncio.sleep(interval)

    async with httpx.AsyncClient(timeout=30.0, trust_env=not is_loopback(url)) as http:
        task = asyncio.create_task(sample(http))
        try:
            yield histogram
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
