"""``vllm-b70 depth tune``: measures servers of fixed depths and prints the best schedule."""

from __future__ import annotations

import importlib.util
import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_b70.harness.cli import _judged, _parse_levels
from vllm_b70.harness.client import Client
from vllm_b70.harness.depth_model import DepthModel, Measurement
from vllm_b70.harness.identity import progress_bar, say
from vllm_b70.harness.load import run_together
from vllm_b70.harness.metrics import acceptance_between, parse_speculation
from vllm_b70.harness.prompts import make_prompts
from vllm_b70.harness.quickstart import ExitCode
from vllm_b70.harness.results import versions
from vllm_b70.harness.server import Server

app = typer.Typer(no_args_is_help=True, help="Draft depth by the number of users.")
SERVED = "depth-tune"


@app.callback()
def _group() -> None:
    """Draft depth by the number of users."""


@app.command()
def tune(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint to serve; left out with --url.")
    ] = None,
    depths: Annotated[str, typer.Option(help="Depths to serve, separated by commas.")] = "0,1,2,3",
    users: Annotated[str, typer.Option(help="Numbers of users.")] = "1,8,16,32,64",
    url: Annotated[
        list[str] | None,
        typer.Option(help="DEPTH=ADDRESS of a running server with that fixed depth; repeatable."),
    ] = None,
    served: Annotated[str, typer.Option(help="Served model name of the --url servers.")] = SERVED,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each request.", min=2)] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 64,
    highest_token: Annotated[int, typer.Option(help="Highest token id in prompts.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="Fixes prompts and arrivals.")] = 0,
    port: Annotated[int, typer.Option(help="Port of the servers.", min=1, max=65535)] = 8123,
    serve_args: Annotated[str, typer.Option(help="Further arguments of vllm serve.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write measurements and schedule here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot here (.png, .svg); needs matplotlib.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds allowed for each request.")] = 600.0,
) -> None:
    """Measure servers of fixed depths and print the schedule with most tokens a second.

    Exit status: 0 done; 2 bad input; 3 a server died.
    """
    console = Console()

    async def run() -> None:
        if plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(
                "--plot needs matplotlib, which is not installed: pip install 'vllm-b70[report]', "
                "or leave --plot out"
            )
        counts = _parse_levels(users)
        addresses = _addresses(url or [])
        if (model is None) == (not addresses):
            raise ValueError("give a checkpoint to serve, or --url for each running server")
        wanted = sorted(addresses) if addresses else _parse_levels(depths)
        prompts = make_prompts([prompt_tokens] * max(counts), seed, (1, highest_token + 1))
        found: list[Measurement] = []
        with tempfile.TemporaryDirectory(prefix="vllm-b70-depth-") as folder:
            for depth in wanted:
                server: AbstractContextManager[Any] = nullcontext()
                if model is not None:
                    server = make_server(model, depth, max(counts), port, Path(folder), serve_args)
                    say(console, f"depth {depth}: {server.command}")  # type: ignore[attr-defined]
                with server:
                    address = addresses.get(depth, f"http://127.0.0.1:{port}")
                    async with Client(address, served, timeout_s=timeout) as client:
                        found += await measure(
                            client, depth, counts, prompts, tokens, seed, console
                        )
        best = DepthModel(found)
        schedule = best.schedule(max(counts))
        console.print(table(best, counts))
        say(console, f"num_speculative_tokens_per_batch_size: {json.dumps(schedule)}")
        if json_file is not None:
            json_file.write_text(
                json.dumps(
                    {
                        "versions": versions(),
                        "tokens": tokens,
                        "prompt_tokens": prompt_tokens,
                        "measurements": [asdict(m) for m in found],
                        "schedule": schedule,
                    },
                    indent=1,
                )
                + "\n"
            )
        if plot is not None:
            draw(best, counts, plot)

    code = _judged(run, console)
    raise typer.Exit(ExitCode.BAD_INPUT if code == ExitCode.FAILED else code)


def _addresses(texts: Sequence[str]) -> dict[int, str]:
    found = {}
    for text in texts:
        depth, _, address = text.partition("=")
        if not depth.isdigit() or not address:
            raise ValueError(f"--url {text} is not DEPTH=ADDRESS, for example 3=http://host:8000")
        found[int(depth)] = address
    return found


def make_server(
    model: str, depth: int, users: int, port: int, folder: Path, serve_args: str
) -> Server:
    """The server of one fixed depth, not started."""
    argv = ["vllm", "serve", model, "--port", str(port), "--served-model-name", SERVED]
    argv += ["--max-num-seqs", str(users), *shlex.split(serve_args)]
    if depth:
        argv += ["--speculative-config"]
        argv += [json.dumps({"method": "mtp", "num_speculative_tokens": depth})]
    log = folder / f"depth-{depth}.log"
    return Server(argv, port=port, log_path=log, env={"VLLM_B70": "1"})


async def measure(
    client: Client,
    depth: int,
    counts: Sequence[int],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    seed: int,
    console: Console,
) -> list[Measurement]:
    """One measurement for each number of users, after a pass that warms the server.

    Each user sends one prompt, all together, so that the number of requests stays what it is until
    the end.

    Raises:
        ValueError: The server's drafts are not those of a fixed depth.
        ServerError, ResponseError: From a request that fails.
    """
    found = []
    await run_together(client, prompts, min(tokens, 8), len(prompts), seed)
    for users in counts:
        before = parse_speculation(await client.metrics())
        begin = time.perf_counter()
        with progress_bar(console, f"depth {depth}, {users} users") as progress:
            await run_together(
                client, prompts[:users], tokens, users, seed, progress, longest_delay_s=0
            )
        seconds = time.perf_counter() - begin
        accepted = acceptance_between(before, parse_speculation(await client.metrics()))
        made = len(accepted.per_position)
        if made > depth or (made < depth and accepted.drafts) or (depth and not accepted.drafts):
            raise ValueError(
                f"the server {client.base_url} made drafts of up to {made} tokens, not of {depth}: "
                f"give the address of one with num_speculative_tokens={depth} and no schedule"
            )
        found.append(Measurement(depth, users, users * tokens / seconds, accepted.per_position))
    return found


def table(model: DepthModel, counts: Sequence[int]) -> Table:
    """Tokens a second by users and depth, and what was accepted; the best depth of each marked."""
    shown = Table(title="Tokens a second", title_justify="left", box=box.SIMPLE, pad_edge=False)
    shown.add_column("users", justify="right")
    for depth in model.lines:
        shown.add_column(f"depth {depth}", justify="right", no_wrap=True)
    for users in counts:
        best = model.best(users)
        speeds = {depth: f"{model.tokens_per_s(depth, users):.1f}" for depth in model.lines}
        shown.add_row(str(users), *(f"{s} *" if d == best else s for d, s in speeds.items()))
    for name, value in (
        ("ms a step", lambda m: f"{1e3 * m.step_s:.2f}"),
        ("tokens a step", lambda m: f"{m.tokens_per_step:.2f}"),
    ):
        last = [line[-1] for line in model.lines.values()]
        shown.add_row(f"{name} at {last[0].users}", *map(value, last))
    return shown


def draw(model: DepthModel, counts: Sequence[int], path: Path) -> None:
    """Plot the model's lines over the measured points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    xs = range(min(counts), max(counts) + 1)
    for depth, line in model.lines.items():
        (drawn,) = axes.plot(xs, [model.tokens_per_s(depth, x) for x in xs], label=f"depth {depth}")
        points = [m.users for m in line], [m.tokens_per_s for m in line]
        axes.plot(*points, "o", color=drawn.get_color())
    axes.set_xlabel("users")
    axes.set_ylabel("tokens a second, all users")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
