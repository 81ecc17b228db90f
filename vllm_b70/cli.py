"""``vllm-b70``: the command line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vllm_b70.harness.cli import app as harness_app
from vllm_b70.harness.depth_tune import app as depth_app
from vllm_b70.speculation.shortlist_cli import app as shortlist_app

app = typer.Typer(
    help="Tools around the vllm_b70 plugin of vLLM.", no_args_is_help=True, add_completion=False
)
checkpoint_app = typer.Typer(help="Make and check checkpoints.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(shortlist_app, name="shortlist")
app.add_typer(depth_app, name="depth")
for command in harness_app.registered_commands:
    app.registered_commands.append(command)


class Format(StrEnum):
    """How the weights are stored."""

    ct = "ct"
    gptq = "gptq"
    bf16 = "bf16"


class Shape(StrEnum):
    """Which model's proportions and quantised modules."""

    small = "9b"
    large = "27b"


class Device(StrEnum):
    """What a vLLM is built for."""

    cpu = "cpu"
    cuda = "cuda"
    xpu = "xpu"


@checkpoint_app.command("tiny")
def tiny(
    directory: Annotated[Path, typer.Argument(help="Folder to make; it must not hold anything.")],
    format: Annotated[Format, typer.Option(help="ct: compressed-tensors.")] = Format.ct,
    shape: Annotated[Shape, typer.Option(help="Whose proportions.")] = Shape.small,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    conditional: Annotated[
        bool, typer.Option(help="The ForConditionalGeneration form, with a vision tower.")
    ] = False,
) -> None:
    """Make a seeded random Qwen3.5 checkpoint of a few megabytes, with an MTP head."""
    from vllm_b70.checkpoints.errors import CheckpointError
    from vllm_b70.checkpoints.tiny import make_tiny

    try:
        make_tiny(
            directory,
            format=format.value,
            shape=shape.value,
            seed=seed,
            conditional=conditional,
        )
    except CheckpointError as error:
        raise typer.Exit(_fail(error)) from error
    typer.echo(f"made {directory}")


@checkpoint_app.command("check")
def check(
    directory: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
) -> None:
    """Check a checkpoint's configuration and tensor headers against what the kernels cover."""
    from vllm_b70.checkpoints.check import check_checkpoint
    from vllm_b70.checkpoints.errors import CheckpointError

    try:
        check_checkpoint(directory)
    except CheckpointError as error:
        raise typer.Exit(_fail(error)) from error
    typer.echo(f"{directory}: nothing wrong found")


@app.command("doctor")
def doctor(
    model: Annotated[Path | None, typer.Option(help="Checkpoint whose memory to work out.")] = None,
    users: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 1,
    depth: Annotated[int, typer.Option(help="Drafts a step.", min=0)] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of a request.", min=1)] = 8192,
    cards: Annotated[int, typer.Option(help="Tensor parallel size.", min=1)] = 1,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Say what this machine, its software and its settings mean for the exact route.

    Exit status: 0 nothing worse than a note; 1 a warning; 2 an error.
    """
    from vllm_b70.doctor import report

    findings = report.examine(model, users, depth, tokens, cards)
    if json:
        from json import dumps

        typer.echo(dumps(report.as_json(findings), indent=1))
    else:
        from rich.console import Console

        Console().print(report.as_table(findings))
    raise typer.Exit(report.STATUS[report.worst(findings)])


@app.command("census", context_settings={"ignore_unknown_options": True})
def census(
    model: Annotated[str, typer.Option(help="Folder or hub id of a checkpoint.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(help="Options of `vllm serve`, after `--`: the census asks for its rows."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the certificate to this file.")] = None,
    device: Annotated[
        Device | None, typer.Option(help="Refuse to run on another kind of device.")
    ] = None,
) -> None:
    """Certify every op of a model on this device; exit status 1 if one is not exact."""
    from vllm_b70.census.command import run

    raise typer.Exit(run(model, options or [], json, None if device is None else device.value))


def _fail(error: Exception) -> int:
    typer.echo(f"vllm-b70: {error}", err=True)
    return 2


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
