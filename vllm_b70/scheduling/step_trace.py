"""One JSON line a scheduler step: the harness proves from it that a run was not vacuous."""

from __future__ import annotations

import json
import logging
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


logger = logging.getLogger("vllm.vllm_b70")


class StepTrace:
    """Writes steps to a file, one line each, flushed, so that a reader may follow it.

    A new trace replaces what a former server left in the file: its steps are not this server's.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._step = 0
        self._failed = False

    def write(self, step: Step) -> None:
        """Append one step; steps are numbered from 0 in the order of the calls.

        A full disk ends the trace, with one line in the log, and not the server.
        """
        if self._failed:
            return
        line = {
            "step": self._step,
            "requests": step.requests,
            "prompt_tokens": step.prompt_tokens,
            "widths": {str(width): count for width, count in sorted(step.widths.items())},
            "preempted": step.preempted,
            "cuts": step.cuts,
        }
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            self._failed = True
            logger.error("vllm_b70: the step trace ends at step %d: %s", self._step, error)
        self._step += 1
