import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeServer
from rich.console import Console

from vllm_b70.harness.client import Client, Completion, ServerError
from vllm_b70.harness.identity import About, check_levels, make_oracle, progress_bar, verify_levels
from vllm_b70.harness.oracle import run_alone
from vllm_b70.harness.results import StepResult

Start = Callable[..., FakeServer]
TOKENS = 12


def verify(
    server: FakeServer,
    prompts: list[list[int]],
    console: Console,
    levels: tuple[int, ...] = (2, 4),
    **options: Any,
) -> list[StepResult]:
    return asyncio.run(
        verify_levels(
            server.base_url, "tiny", prompts, TOKENS, levels=levels, console=console, **options
        )
    )


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_exact_server_passes_every_level(
    fake: Start, prompts: list[list[int]], console: Console, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    server = fake(holds=[1, 2, 4], depth=3, trace=trace)
    saved: list[StepResult] = []
    about = About("cell", "ct-9b", 3, "vllm serve x", "exact")
    steps = verify(server, prompts, console, trace=trace, about=about, on_result=saved.append)
    assert saved == steps
    assert [(step.mode, step.users) for step in steps] == [
        ("oracle", 1),
        ("exact", 2),
        ("exact", 4),
    ]
    assert [step.failures for step in steps] == [[], [], []]
    assert [step.max_running for step in steps] == [1, 2, 4]
    assert [step.sequences for step in steps] == [0, 6, 6]
    assert len({step.token_hash for step in steps}) == 1
    for step in steps:
        assert set(step.widths) == {"4"}
        assert step.acceptance is not None and 0 < step.acceptance < 1
        assert len(step.acceptance_per_position) == 3
        assert step.tokens_per_s > 0
        assert (step.checkpoint, step.depth, step.command) == ("ct-9b", 3, "vllm serve x")
    assert "0 of 6 sequences differ" in text(console)


def test_other_tokens_under_load_are_caught_and_shown(
    fake: Start, prompts: list[list[int]], console: Console, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    server = fake(mode="load", holds=[1, 2], trace=trace)
    oracle, level = verify(server, prompts, console, (2,), trace=trace)
    assert oracle.failures == []
    assert level.mismatches > 0
    assert level.failures == [f"{level.mismatches} of 6 sequences differ from the oracle"]
    assert level.token_hash != oracle.token_hash
    assert "first divergence: prompt " in text(console)
    assert "position 3: expected token " in text(console)


def test_a_control_reports_mismatches_without_failing(
    fake: Start, prompts: list[list[int]], console: Console, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    server = fake(mode="load", holds=[1, 2], trace=trace)
    level = verify(server, prompts, console, (2,), trace=trace, about=About(mode="control"))[-1]
    assert level.mismatches > 0 and level.failures == []


def test_other_logprobs_are_counted(
    fake: Start, prompts: list[list[int]], console: Console, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    server = fake(mode="logprobs", holds=[1, 6], trace=trace)
    level = verify(server, prompts, console, (6,), trace=trace)[-1]
    assert level.mismatches == 0 and level.logprob_mismatches > 0


def test_a_level_that_was_not_reached_fails(
    fake: Start, prompts: list[list[int]], console: Console
) -> None:
    # The gauge never shows more than three, whatever is sent.
    level = verify(fake(gauge=3, holds=[1, 4]), prompts, console, (4,))[-1]
    assert level.mismatches == 0
    assert any("level 4 was not reached: at most" in failure for failure in level.failures)


def test_short_answers_fail(fake: Start, prompts: list[list[int]], console: Console) -> None:
    steps = verify(fake(mode="short"), prompts, console, (1,))
    for step in steps:
        assert any("6 answers are shorter than the 12 tokens" in text for text in step.failures)


def test_an_oracle_in_company_fails(
    fake: Start, prompts: list[list[int]], console: Console, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    server = fake(trace=trace, holds=[2], phase_size=1000)

    async def run() -> StepResult:
        async with Client(server.base_url, "tiny") as client:
            other = asyncio.create_task(client.complete([8, 8], 1000))
            _, step = await make_oracle(
                server.base_url, "tiny", prompts, TOKENS, trace=trace, console=console
            )
            other.cancel()
        return step

    assert any("was not alone: 2 requests" in text for text in asyncio.run(run()).failures)


def test_a_trace_of_another_server_fails(
    fake: Start, prompts: list[list[int]], console: Console, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    step = verify(fake(), prompts, console, (1,), trace=trace)[-1]
    assert any("gained no step" in failure for failure in step.failures)


def test_a_given_oracle_is_used(
    fake: Start, prompts: list[list[int]], console: Console, tmp_path: Path
) -> None:
    async def alone() -> list[Completion]:
        async with Client(fake().base_url, "tiny") as client:
            return await run_alone(client, prompts, TOKENS)

    oracle = asyncio.run(alone())
    trace = tmp_path / "trace.jsonl"
    (good,) = verify(
        fake(holds=[2], trace=trace), prompts, console, (2,), oracle=oracle, trace=trace
    )
    assert good.failures == []
    trace = tmp_path / "other.jsonl"
    (bad,) = verify(
        fake(mode="other", holds=[2], trace=trace),
        prompts,
        console,
        (2,),
        oracle=oracle,
        trace=trace,
    )
    assert bad.mismatches == 6


def test_finished_levels_survive_a_server_that_dies(
    fake: Start, prompts: list[list[int]], console: Console
) -> None:
    saved: list[StepResult] = []
    with pytest.raises(ServerError):
        verify(fake(mode="drop", after=8), prompts, console, on_result=saved.append)
    assert [step.mode for step in saved] == ["oracle"]


def test_notes(fake: Start, prompts: list[list[int]], console: Console) -> None:
    verify(fake(cached_tokens=16), [prompt[:60] for prompt in prompts], console, (1,))
    assert "96 prompt tokens came from a prefix cache" in text(console)
    assert "no prompt is longer than a KV block of 64 tokens" in text(console)


def test_impossible_levels_are_refused() -> None:
    check_levels([1, 6], 6)
    for levels, reason in (([], "no level"), ([0], "level 0"), ([2, 7], "cannot reach 7")):
        with pytest.raises(ValueError, match=reason):
            check_levels(levels, 6)


@pytest.mark.parametrize("terminal", [False, True])
def test_bars_are_for_terminals(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with progress_bar(console, "cell [1]: 8 users") as progress:
        progress(1, 2)
    assert bool(text(console)) is terminal
