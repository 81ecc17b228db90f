"""The harness's commands: ``quickstart`` (start servers) and ``verify`` (a running server)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from vllm_b70.harness.client import Client, HarnessError, ServerError
from vllm_b70.harness.identity import About, check_levels, make_oracle, say, verify_levels
from vllm_b70.harness.oracle import OracleError, load_oracle, save_oracle
from vllm_b70.harness.prompts import default_lengths, make_prompts
from vllm_b70.harness.quickstart import (
    EDGES,
    KV_BLOCK,
    MAX_MODEL_LEN,
    ExitCode,
    default_cells,
    run_cells,
    select_cells,
)
from vllm_b70.harness.results import (
    DiskFullError,
    StepResult,
    table,
    versions,
    write_results,
)

app = typer.Typer(
    no_args_is_help=True,
    help="Prove that a server's tokens do not depend on who else is on it.",
)


@app.command()
def quickstart(
    control: Annotated[
        bool, typer.Option("--control", help="Also run the control, which must differ.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Also run more formats, shapes and depths.")
    ] = False,
    workdir: Annotated[
        Path, typer.Option(help="Checkpoints, logs and caches go below this directory.")
    ] = Path("vllm-b70-quickstart"),
    results: Annotated[
        Path | None, typer.Option(help="Results file.", show_default="WORKDIR/results.json")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the servers.", min=1, max=65535)] = 8123,
    prompts: Annotated[int, typer.Option(help="Number of prompts.", min=2)] = 36,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each.", min=1)] = 48,
    cells: Annotated[
        str, typer.Option(help="Run only cells whose name matches this regular expression.")
    ] = "",
) -> None:
    """Make tiny checkpoints, serve them and prove that their tokens never change.

    Exit status: 0 proved; 1 a mismatch or a failed proof; 2 bad input; 3 a server died.
    """
    console = Console()
    try:
        chosen = select_cells(default_cells(full=full, control=control), cells)
    except ValueError as error:
        say(console, f"error: {error}")
        raise typer.Exit(ExitCode.BAD_INPUT) from error
    # SIGTERM would otherwise end this process and leave its server running.
    signal.signal(signal.SIGTERM, _interrupt)
    code = run_cells(
        chosen,
        workdir,
        results or workdir / "results.json",
        port=port,
        prompts=prompts,
        tokens=tokens,
        console=console,
    )
    raise typer.Exit(code)


@app.command()
def verify(
    base_url: Annotated[str, typer.Option(help="Address of the running server.")],
    model: Annotated[str, typer.Option(help="Served model name.")],
    levels: Annotated[str, typer.Option(help="Numbers of users, separated by commas.")] = "8,16,32",
    prompts: Annotated[int, typer.Option(help="Number of prompts.", min=2)] = 36,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each.", min=1)] = 48,
    seed: Annotated[int, typer.Option(help="Fixes prompts and arrivals.")] = 0,
    lowest_token: Annotated[int, typer.Option(help="Lowest token id in prompts.", min=0)] = 1,
    highest_token: Annotated[int, typer.Option(help="Highest token id in prompts.", min=1)] = 1000,
    oracle: Annotated[
        Path | None, typer.Option(help="Oracle file: used if it exists, else written.")
    ] = None,
    step_trace: Annotated[
        Path | None, typer.Option(help="The server's VLLM_B70_STEP_TRACE file.")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="Results file.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds allowed for each request.")] = 600.0,
) -> None:
    """Compare a running server's answers under load with its answers to each prompt alone.

    Exit status: 0 proved; 1 a mismatch or a failed proof; 2 bad input; 3 the server died.
    """
    console = Console()
    steps: list[StepResult] = []
    ran_on = versions()

    def done(step: StepResult) -> None:
        steps.append(step)
        if results is not None:
            write_results(results, ran_on, steps)

    async def run() -> None:
        users = _parse_levels(levels)
        check_levels(users, prompts)
        async with Client(base_url, model, timeout_s=timeout) as client:
            longest = (await client.max_model_len() or MAX_MODEL_LEN) - tokens
        lengths = default_lengths(
            prompts, seed, longest=min(longest, MAX_MODEL_LEN), block=KV_BLOCK, also=EDGES
        )
        batch = make_prompts(lengths, seed, (lowest_token, highest_token + 1))
        about = About(name="verify", checkpoint=model)
        if oracle is not None and oracle.exists():
            reference = load_oracle(oracle, batch, tokens, model)
        else:
            reference, step = await make_oracle(
                base_url,
                model,
                batch,
                tokens,
                about=about,
                trace=step_trace,
                timeout_s=timeout,
                console=console,
            )
            done(step)
            # An oracle that was not alone or is too short must not judge later runs.
            if oracle is not None and not step.failures:
                save_oracle(oracle, reference, batch, tokens, model)
        await verify_levels(
            base_url,
            model,
            batch,
            tokens,
            levels=users,
            oracle=reference,
            about=about,
            seed=seed,
            trace=step_trace,
            timeout_s=timeout,
            console=console,
            on_result=done,
        )

    code = _judged(run, console)
    if steps:
        console.print(table(steps))
    if code == ExitCode.SERVER_DIED and results is not None:
        say(console, f"The {len(steps)} finished steps are kept in {results}.")
    if code == ExitCode.OK and any(step.failures for step in steps):
        code = ExitCode.FAILED
    raise typer.Exit(code)


def _judged(run: Callable[[], Coroutine[None, None, None]], console: Console) -> ExitCode:
    """Run the body and turn what it raises into a printed reason and an exit code."""
    try:
        asyncio.run(run())
    except (ValueError, OracleError) as error:
        say(console, f"error: {error}")
        return ExitCode.BAD_INPUT
    except ServerError as error:
        say(console, f"STOPPED: {error}")
        # 4xx: the server lives and refuses what it was asked.
        refused = error.status is not None and error.status < 500
        return ExitCode.BAD_INPUT if refused else ExitCode.SERVER_DIED
    except DiskFullError as error:
        say(console, f"STOPPED: {error}")
        return ExitCode.SERVER_DIED
    except HarnessError as error:
        say(console, f"FAILED: {error}")
        return ExitCode.FAILED
    except OSError as error:
        say(console, f"error: {error}")
        return ExitCode.BAD_INPUT
    return ExitCode.OK


def _parse_levels(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"levels {text!r} are not numbers separated by commas") from error


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
