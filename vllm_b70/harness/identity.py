"""Proves on one running server that answers do not depend on the number of users."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_b70.harness import metrics
from vllm_b70.harness.client import Client, Completion
from vllm_b70.harness.compare import Comparison, compare, token_hash
from vllm_b70.harness.load import run_together
from vllm_b70.harness.oracle import run_alone
from vllm_b70.harness.results import StepResult
from vllm_b70.harness.steps import StepHistogram, poll_running, read_trace

#: How often a level is run before it counts as not reached.
ATTEMPTS = 3


@dataclass(frozen=True)
class About:
    """What the results say about the server: see `StepResult` for the meaning of each."""

    name: str = "verify"
    checkpoint: str = ""
    depth: int = 0
    command: str = ""
    mode: str = "verify"


@dataclass(frozen=True)
class _Measured:
    completions: list[Completion]
    histogram: StepHistogram
    acceptance: metrics.Acceptance
    seconds: float
    failures: list[str]


async def make_oracle(
    base_url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    about: About | None = None,
    trace: Path | None = None,
    timeout_s: float = 600.0,
    console: Console | None = None,
) -> tuple[list[Completion], StepResult]:
    """Answer every prompt alone and describe the run as a step of mode ``oracle``.

    The step fails when answers are shorter than asked or when requests were not alone.

    Raises:
        ServerError, ResponseError: from the first request that fails.
        TraceError: the step trace is malformed.
    """
    about = about or About()
    console = console or Console()
    async with Client(base_url, model, timeout_s=timeout_s) as client:
        with progress_bar(console, f"{about.name}: alone") as progress:
            measured = await _measure(
                client, trace, lambda: run_alone(client, prompts, max_tokens, progress)
            )
        block = metrics.parse_block_size(await client.metrics())
    failures = measured.failures + _short_outputs(measured.completions, max_tokens)
    if measured.histogram.max_requests > 1:
        failures.append(
            f"the oracle was not alone: {measured.histogram.max_requests} requests ran together"
        )
    step = _result(about, "oracle", 1, None, measured, failures)
    _print_step(console, step, measured.histogram, None)
    longest = max(map(len, prompts), default=0)
    if block is not None and longest <= block:
        say(console, f"  note: no prompt is longer than a KV block of {block} tokens")
    return measured.completions, step


async def verify_levels(
    base_url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    levels: Sequence[int],
    oracle: Sequence[Completion] | None = None,
    about: About | None = None,
    seed: int = 0,
    trace: Path | None = None,
    timeout_s: float = 600.0,
    longest_delay_s: float = 0.02,
    console: Console | None = None,
    on_result: Callable[[StepResult], None] | None = None,
) -> list[StepResult]:
    """Run the prompts at each level and compare them with the oracle.

    Args:
        base_url: address of the server.
        model: served model name.
        prompts: token ids; at least as many as the highest level.
        max_tokens: tokens to generate for each prompt.
        levels: numbers of users, run in this order.
        oracle: the reference answers; made first, alone, when None.
        about: what the results say about the server.
        seed: fixes the arrival order and delays; each level gets its own.
        trace: the server's step trace; without one the gauge of running requests is sampled.
        timeout_s: seconds allowed for each request.
        longest_delay_s: upper end of the random arrival delay in seconds.
        console: where progress and first divergences are printed.
        on_result: called with each result as soon as it exists, so that it can be saved.

    Returns:
        One result a level, preceded by the oracle's when it was made here. A result lists as
        failures: mismatches, a level that the server never reached, short answers.

    Raises:
        ValueError: no levels, a level below 1 or above the number of prompts.
        ServerError, ResponseError: from the first request that fails.
        TraceError: the step trace is malformed.
    """
    check_levels(levels, len(prompts))
    about = about or About()
    console = console or Console()
    results: list[StepResult] = []

    def done(step: StepResult) -> None:
        results.append(step)
        if on_result is not None:
            on_result(step)

    if oracle is None:
        oracle, step = await make_oracle(
            base_url,
            model,
            prompts,
            max_tokens,
            about=about,
            trace=trace,
            timeout_s=timeout_s,
            console=console,
        )
        done(step)
    async with Client(base_url, model, timeout_s=timeout_s) as client:
        for index, level in enumerate(levels):
            # On a busy machine requests may come too slowly for a level; that is no mismatch, and
            # the level is run again.
            for attempt in range(ATTEMPTS):
                step = await _run_level(
                    client,
                    prompts,
                    max_tokens,
                    level=level,
                    oracle=oracle,
                    about=about,
                    # Another arrival order each time: the same one twice would prove less.
                    seed=seed + index + 1000 * attempt,
                    trace=trace,
                    longest_delay_s=longest_delay_s,
                    console=console,
                )
                if step.mismatches or step.max_running >= level or about.mode == "control":
                    break
            done(step)
    return results


def check_levels(levels: Sequence[int], prompts: int) -> None:
    """Check that ``prompts`` prompts can reach every level.

    Raises:
        ValueError: they cannot, or there are no levels.
    """
    if not levels:
        raise ValueError("no level was asked for")
    if min(levels) < 1:
        raise ValueError(f"level {min(levels)} is not a number of users")
    if max(levels) > prompts:
        raise ValueError(f"{prompts} prompts cannot reach {max(levels)} users; ask for more")


@contextlib.contextmanager
def progress_bar(console: Console, label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere (a log needs no animation)."""
    if not console.is_terminal:
        yield lambda done, total: None
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def say(console: Console, text: str) -> None:
    """Print plain text: names may hold brackets, which rich would take for markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


async def _run_level(
    client: Client,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    level: int,
    oracle: Sequence[Completion],
    about: About,
    seed: int,
    trace: Path | None,
    longest_delay_s: float,
    console: Console,
) -> StepResult:
    with progress_bar(console, f"{about.name}: {level} users") as progress:
        measured = await _measure(
            client,
            trace,
            lambda: run_together(
                client,
                prompts,
                max_tokens,
                level,
                seed,
                progress,
                longest_delay_s=longest_delay_s,
            ),
        )
    comparison = compare(oracle, measured.completions)
    failures = measured.failures + _short_outputs(measured.completions, max_tokens)
    # A control must differ; whether it did is judged over all its levels, by who runs it.
    if comparison.mismatches and about.mode != "control":
        failures.append(
            f"{comparison.mismatches} of {comparison.sequences} sequences differ from the oracle"
        )
    reached = measured.histogram.max_requests
    # A control only has to differ somewhere.
    if reached < level and about.mode != "control":
        failures.append(
            f"level {level} was not reached: at most {reached} requests ran together, "
            "so this level proves nothing"
        )
    step = _result(about, about.mode, level, comparison, measured, failures)
    _print_step(console, step, measured.histogram, comparison)
    cached = sum(completion.cached_tokens or 0 for completion in measured.completions)
    if cached:
        say(console, f"  note: {cached} prompt tokens came from a prefix cache, not from compute")
    return step


async def _measure(
    client: Client, trace: Path | None, run: Callable[[], Awaitable[list[Completion]]]
) -> _Measured:
    """Run something and gather which steps it took, what was accepted and how long it lasted."""
    before = metrics.parse_speculation(await client.metrics())
    traced = trace is not None and trace.exists()
    last_step = read_trace(trace).last_step if trace is not None and traced else -1
    start = time.perf_counter()
    async with _gauge_unless(traced, client.base_url) as sampled:
        completions = await run()
    seconds = time.perf_counter() - start
    after = metrics.parse_speculation(await client.metrics())
    histogram = sampled
    failures = []
    if trace is not None and trace.exists():
        histogram = read_trace(trace, last_step)
        if not histogram.requests:
            failures.append(f"the step trace {trace} gained no step: it is not this server's")
    elif trace is not None:
        failures.append(f"the server wrote no step trace to {trace}")
    return _Measured(
        completions=completions,
        histogram=histogram,
        acceptance=metrics.acceptance_between(before, after),
        seconds=seconds,
        failures=failures,
    )


@contextlib.asynccontextmanager
async def _gauge_unless(traced: bool, base_url: str) -> AsyncIterator[StepHistogram]:
    """Sample the gauge only without a trace: sampling costs the server time."""
    if traced:
        yield StepHistogram()
        return
    async with poll_running(base_url) as histogram:
        yield histogram


def _short_outputs(completions: Sequence[Completion], max_tokens: int) -> list[str]:
    short = [
        index
        for index, completion in enumerate(completions)
        if len(completion.token_ids) < max_tokens
    ]
    if not short:
        return []
    index = short[0]
    return [
        f"{len(short)} answers are shorter than the {max_tokens} tokens asked for (first: prompt "
        f"{index}, {len(completions[index].token_ids)} tokens)"
    ]


def _result(
    about: About,
    mode: str,
    users: int,
    comparison: Comparison | None,
    measured: _Measured,
    failures: list[str],
) -> StepResult:
    tokens = sum(len(completion.token_ids) for completion in measured.completions)
    histogram = measured.histogram
    return StepResult(
        name=about.name,
        checkpoint=about.checkpoint,
        users=users,
        depth=about.depth,
        sequences=comparison.sequences if comparison else 0,
        mismatches=comparison.mismatches if comparison else 0,
        logprob_mismatches=comparison.logprob_mismatches if comparison else 0,
        acceptance=measured.acceptance.overall,
        acceptance_per_position=measured.acceptance.per_position,
        tokens_per_s=tokens / measured.seconds if measured.seconds > 0 else 0.0,
        token_hash=token_hash(measured.completions),
        max_running=histogram.max_requests,
        widths={str(width): histogram.widths[width] for width in sorted(histogram.widths)},
        width_steps={str(w): histogram.width_steps[w] for w in sorted(histogram.width_steps)},
        width_changes=histogram.width_changes,
        command=about.command,
        mode=mode,
        failures=failures,
    )


def _print_step(
    console: Console,
    step: StepResult,
    histogram: StepHistogram,
    comparison: Comparison | None,
) -> None:
    kind = "alone" if step.mode == "oracle" else f"{step.users} users"
    accepted = "" if step.acceptance is None else f", {step.acceptance:.1%} of drafts accepted"
    say(
        console,
        f"{step.name}, {kind}: {step.tokens_per_s:.1f} tok/s{accepted}, "
        f"tokens {step.token_hash[:16]}",
    )
    say(console, f"  {histogram}")
    if comparison is not None:
        say(
            console,
            f"  {comparison.mismatches} of {comparison.sequences} sequences differ in tokens, "
            f"{comparison.logprob_mismatches} in logprobs",
        )
        if comparison.divergences:
            say(console, f"  first divergence: {comparison.divergences[0]}")
    for failure in step.failures:
        say(console, f"  FAILED: {failure}")
