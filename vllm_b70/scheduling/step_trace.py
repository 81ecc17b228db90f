"""One JSON line a scheduler step: the harness proves from it that a run was not vacuous."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Step:
    """What one scheduler step held.

    Attributes:
        requests: Requests that ran.
        prompt_tokens: Tokens of prompt chunks.
        widths: For the rows past their prompt, how many had each number of tokens
            (1 without drafts, k+1 with k drafts).
        preempted: Requests preempted in this step.
        cuts: Prompt chunks that the grid made shorter than the budget.
    """

    requests: int = 0
    prompt_tokens: int = 0
    widths: Counter[int] = field(default_factory=Counter)
    preempted: int = 0
    cuts: int = 0


class StepTrace:
    """Appends steps to a file, one line each, flushed, so that a reader may follow it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._step = 0

    def write(self, step: Step) -> None:
        """Append one step; steps are numbered from 0 in the order of the calls."""
        line = {
            "step": self._step,
            "requests": step.requests,
            "prompt_tokens": step.prompt_tokens,
            "widths": {str(width): count for width, count in sorted(step.widths.items())},
            "preempted": step.preempted,
            "cuts": step.cuts,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._step += 1
