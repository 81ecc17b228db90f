"""What the benchmarks of the two GEMMs share: the command line, and the choice for a table."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import head
from vllm_b70.ops import tiles
from vllm_b70.ops.tiles import Tile

Shape = tuple[int, int]
#: Microseconds and the tile, by row count.
Times = dict[int, tuple[float, Tile]]


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that both benchmarks take."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("command", choices=["tune", "compare"])
    made.add_argument("--out", type=Path, required=True)
    made.add_argument(
        "--shapes", help="for example 24576x4096,4096x4096; default: all mandatory; all: more"
    )
    made.add_argument("--dtypes", default="float16,bfloat16")
    made.add_argument("--tiles", type=Path, help="compare: a table from tune, not the package's")
    made.add_argument("--seconds", type=float, default=480.0, help="stop starting new work then")
    return made


def run(
    arguments: argparse.Namespace,
    op: str,
    shapes: list[Shape],
    more: list[Shape],
    tune: Callable[[list[Shape], float], dict[str, Any]],
    compare: Callable[[list[Shape], list[torch.dtype], float, Any], None],
) -> None:
    """Do what the command line asks for, and write it.

    Args:
        arguments: From ``parser``.
        op: Name of the op whose table of tiles is in question.
        shapes, more: Weights by default, and those that ``all`` adds.
        tune: From shapes and the time to stop at to the table's entries.
        compare: From shapes, dtypes and that time; calls its last argument with all rows so far.
    """
    until = time.time() + arguments.seconds
    if arguments.shapes == "all":
        shapes = shapes + more
    elif arguments.shapes:
        shapes = [tuple(map(int, s.split("x"))) for s in arguments.shapes.split(",")]  # type: ignore[misc]
    torch.manual_seed(0)
    if arguments.tiles:
        kept, table = tiles._table, tiles._table(op) | json.loads(arguments.tiles.read_text())
        tiles._table = lambda name: table if name == op else kept(name)  # type: ignore[assignment]
    if arguments.command == "tune":
        made = {tiles.family(torch.device("cuda")): tune(shapes, until)}
        arguments.out.write_text(json.dumps(made, indent=1) + "\n")
        return
    first = head()
    dtypes = [getattr(torch, name) for name in arguments.dtypes.split(",")]
    compare(
        shapes, dtypes, until,
        lambda rows: arguments.out.write_text(json.dumps(first | {"rows": rows}, indent=1) + "\n"),
    )  # fmt: skip


def entry(best: dict[int, Times], bounds: list[int]) -> dict[str, Any] | None:
    """The table's entry for a weight: the K partition whose times multiply to the least.

    Args:
        best: By K partition.
        bounds: The row counts; a partition that was not timed at all of them does not count.

    Returns:
        None if no partition was timed at all of them. Decode sizes count three times.
    """
    complete = [parts for parts, times in best.items() if len(times) == len(bounds)]
    if not complete:
        return None
    base = best[complete[0]]

    def score(parts: int) -> float:
        return sum(
            (3 if rows == 16 else 1) * math.log(us / base[rows][0])
            for rows, (us, _) in best[parts].items()
        )

    parts = min(complete, key=score)
    chosen = [{"rows": rows} | vars(tile) for rows, (_, tile) in best[parts].items()]
    return {"parts": parts, "tiles": chosen}
