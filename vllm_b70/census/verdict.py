"""What the judges say of an op, and how they count differing elements."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

#: Seeds of the random inputs.
SEEDS = (1, 2, 3)


class Named(Protocol):
    """What tells ops and shapes apart."""

    @property
    def op(self) -> str:
        """Its name, e.g. ``int4_linear``."""

    @property
    def shape(self) -> str:
        """All that makes it distinct, e.g. ``4096x12288 group 128 bfloat16``, columns x depth."""


class Probe(Named, Protocol):
    """One distinct op and shape on the path."""

    @property
    def least_memory(self) -> int:
        """Bytes that ``census.memory`` must allow for it to be asked at all."""

    def judge(self) -> Verdict:
        """Run the installed implementation and compare."""


@dataclass(frozen=True)
class Verdict:
    """What was found of one op.

    Attributes:
        op, shape: As in ``Probe``.
        exact: No element differed.
        differs: What differed, in words; empty if nothing did.
        rows: The row counts that were compared, e.g. ``1-32, 48, 512``.
        calls: How often the op ran.
        seconds: How long all of it took, compilation included.
    """

    op: str
    shape: str
    exact: bool
    differs: str
    rows: str
    calls: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that NaN equals NaN and 0 differs from -0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


@dataclass
class Tally:
    """Differing elements of many comparisons, counted on the device and read once at the end."""

    device: torch.device
    begun: float = field(default_factory=time.perf_counter)
    calls: int = 0
    _counts: list[torch.Tensor] = field(default_factory=list)
    _labels: list[tuple[str, int]] = field(default_factory=list)

    def compare(
        self,
        got: tuple[torch.Tensor, ...],
        want: tuple[torch.Tensor, ...],
        check: str,
        rows: int,
    ) -> None:
        """Note whether tensors of equal shapes differ.

        Args:
            got, want: Results.
            check: What was compared, with ``{}`` for the row count.
            rows: The row count.
        """
        self.calls += 1
        for a, b in zip(got, want, strict=True):
            self._counts.append((bits(a) != bits(b)).any())
            self._labels.append((check, rows))

    def measure(self, results: tuple[torch.Tensor, ...], rows: int) -> None:
        """Note whether what others are compared with is not finite: NaN equals NaN, so it would say
        nothing. Zeros may be right: weights may be 0."""
        for tensor in results:
            if tensor.is_floating_point():
                self._counts.append(~tensor.isfinite().all())
                self._labels.append(("results that are not finite at {} rows", rows))

    def found(self) -> dict[str, list[int]]:
        """Row counts that differ, by check; waits for the device."""
        if not self._counts:
            return {}
        wrong: dict[str, set[int]] = {}
        for (check, rows), bad in zip(
            self._labels, torch.stack(self._counts).tolist(), strict=True
        ):
            if bad:
                wrong.setdefault(check, set()).add(rows)
        return {check: sorted(rows) for check, rows in wrong.items()}

    def verdict(self, op: str, shape: str) -> Verdict:
        """Close the tally."""
        differs = "; ".join(check.format(spans(rows)) for check, rows in self.found().items())
        counted = spans(sorted({rows for _, rows in self._labels}))
        seconds = round(time.perf_counter() - self.begun, 4)
        return Verdict(op, shape, not differs, differs, counted, self.calls, seconds)


def spans(numbers: list[int]) -> str:
    """Ascending integers in short: ``1-4, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
