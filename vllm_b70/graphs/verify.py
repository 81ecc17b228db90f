"""Replays every captured graph against an eager step on the same inputs, bit for bit.

What it knows of vLLM is the protocol ``CapturedRun``. Inputs change between capture and replay and
from one replay to the next, so a graph that reads anything but its step's own inputs shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

#: One replay of each graph for each seed.
SEEDS = (0, 1)
#: Parts of a server, and what to set to serve without their graphs.
TARGET, DRAFTER = "target", "drafter"
INSTEAD = {TARGET: "off", DRAFTER: "target"}


class GraphError(RuntimeError):
    """A graph cannot be captured, or is not the eager step that it stands for."""


@dataclass(frozen=True)
class Part:
    """What the results and the buffers of a step are called: whose, and what."""

    whose: str
    what: str


Tensors = Mapping[Part, torch.Tensor]


class CapturedRun(Protocol):
    """Steps of one size and depth."""

    @property
    def name(self) -> str:
        """The size and the depth, as a user knows them."""

    def prepare(self, seed: int) -> bool:
        """Make inputs that differ from those of the capture and of any other seed.

        Returns:
            False if there is nothing else to try with this seed.
        """

    def replay(self) -> Tensors:
        """The step's results by its graphs, from the state that ``prepare`` left."""

    def buffers(self) -> Tensors:
        """The index buffers that the replay read."""

    def eager(self) -> Tensors:
        """The step's results without graphs, from the same state. It runs after the replay, so
        that nothing it leaves can make up for what the replay did not do."""


@dataclass(frozen=True)
class Difference:
    """A graph that is not the eager step.

    Attributes:
        run: Name of the run.
        part: What differs.
        how: In a few words.
    """

    run: str
    part: Part
    how: str


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a tensor as integers: NaN equals itself, and 0 is not -0."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    rows = torch.atleast_1d(tensor).contiguous().view(kinds[tensor.element_size()])
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """How two results differ, or None if they have the same bits."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {(*got.shape,)}, not {want.dtype} {(*want.shape,)}"
    differ = (_bits(got) != _bits(want)).any(1)
    rows = int(differ.sum())
    return f"{rows} of {len(differ)} rows" if rows else None


def verify(runs: Iterable[CapturedRun], seeds: Sequence[int] = SEEDS) -> list[Difference]:
    """Compare all runs. None stops the others: on several cards every rank makes the same calls,
    whatever it finds.

    Args:
        runs: One for each size and depth.
        seeds: One replay each.

    Returns:
        What differs, at most one entry for each result of a run.
    """
    found: dict[tuple[str, Part], Difference] = {}

    def note(run: CapturedRun, part: Part, how: str | None) -> None:
        if how is not None:
            found.setdefault((run.name, part), Difference(run.name, part, how))

    for run in runs:
        for seed in seeds:
            if not run.prepare(seed):
                continue
            got = run.replay()
            for part, buffer in run.buffers().items():
                note(run, part, None if buffer.is_contiguous() else "an index buffer with gaps")
            want = run.eager()
            for part in want.keys() | got.keys():
                if part in want and part in got:
                    note(run, part, difference(got[part], want[part]))
                else:
                    note(run, part, "there in one of them only")
    return list(found.values())


def enforce(differences: Sequence[Difference]) -> None:
    """Raise if a graph differs.

    Raises:
        GraphError: One sentence that names the first sizes and depths and what differs.
    """
    if not differences:
        return
    shown = [f"{d.part.what} of the {d.part.whose} ({d.how}) for {d.run}" for d in differences[:3]]
    rest = len(differences) - len(shown)
    instead = INSTEAD[TARGET if any(d.part.whose == TARGET for d in differences) else DRAFTER]
    raise GraphError(
        "VLLM_B70=1 cannot keep its promise because captured graphs are not the eager steps that "
        f"they stand for: {', '.join(shown)}{f', and {rest} more' if rest else ''}; set "
        f"VLLM_B70_GRAPHS={instead} to serve without them, and report this as a bug of vllm_b70."
    )
