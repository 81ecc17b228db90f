"""Is a tiny model hard enough for a losslessness test to mean anything?

A random model whose output depends on the current token only, or that falls into a short loop,
accepts every draft and passes every comparison. The measures here reject such a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

NEAR_TIE_GAP = 0.05
"""Log-probability gap of the two best tokens below which a position counts as a near tie."""

MIN_NEAR_TIE_FRACTION = 0.05
PERIOD_WINDOW = 32
MAX_PERIOD = 16
MIN_DISTINCT_FRACTION = 0.5
MIN_ACCEPTANCE = 0.05
MAX_ACCEPTANCE = 0.95


@dataclass(frozen=True)
class Hardness:
    """What was measured on a set of greedy outputs.

    Attributes:
        near_tie_fraction: part of all positions with a top-2 gap below ``NEAR_TIE_GAP``.
        periods: per output, the smallest period of its last ``PERIOD_WINDOW`` tokens that is at
            most ``MAX_PERIOD``; None if there is none.
        distinct_fraction: median over outputs of distinct tokens / length.
        acceptance: accepted / proposed draft tokens, or None if no drafts were made.
    """

    near_tie_fraction: float
    periods: tuple[int | None, ...]
    distinct_fraction: float
    acceptance: float | None

    def failures(self) -> list[str]:
        """Return one sentence per bound that is not met; empty if the model is hard."""
        found: list[str] = []
        if self.near_tie_fraction < MIN_NEAR_TIE_FRACTION:
            found.append(
                f"Only {self.near_tie_fraction:.4f} of the positions have a top-2 log-probability "
                f"gap below {NEAR_TIE_GAP}; at least {MIN_NEAR_TIE_FRACTION} is required."
            )
        for index, period in enumerate(self.periods):
            if period is not None:
                found.append(
                    f"The last {PERIOD_WINDOW} tokens of output {index} repeat with period "
                    f"{period}; a period of at most {MAX_PERIOD} is not allowed."
                )
        if self.distinct_fraction < MIN_DISTINCT_FRACTION:
            found.append(
                f"The median of distinct tokens / length is {self.distinct_fraction:.4f}; at "
                f"least {MIN_DISTINCT_FRACTION} is required."
            )
        if self.acceptance is not None and not MIN_ACCEPTANCE < self.acceptance < MAX_ACCEPTANCE:
            found.append(
                f"The draft acceptance is {self.acceptance:.4f}; it must lie strictly between "
                f"{MIN_ACCEPTANCE} and {MAX_ACCEPTANCE}."
            )
        return found


def measure(
    outputs: Sequence[Sequence[int]],
    top2_gaps: Sequence[Sequence[float]],
    acceptance: float | None,
) -> Hardness:
    """Measure greedy outputs.

    Args:
        outputs: generated token ids, one sequence per request, each of at least
            ``PERIOD_WINDOW`` tokens so that periodicity can be seen.
        top2_gaps: per request and position, log p(best) - log p(second); same lengths as
            ``outputs``, every value >= 0.
        acceptance: accepted / proposed draft tokens, or None without speculation.

    Raises:
        ValueError: there are no outputs, one is too short, the lengths differ, or a gap is
            negative or NaN.
    """
    if not outputs:
        raise ValueError("there are no outputs to measure")
    if len(outputs) != len(top2_gaps):
        raise ValueError(f"{len(outputs)} outputs but {len(top2_gaps)} sequences of gaps")
    for index, (tokens, gaps) in enumerate(zip(outputs, top2_gaps, strict=True)):
        if len(tokens) < PERIOD_WINDOW:
            raise ValueError(
                f"output {index} has {len(tokens)} tokens; at least {PERIOD_WINDOW} are needed"
            )
        if len(tokens) != len(gaps):
            raise ValueError(f"output {index} has {len(tokens)} tokens but {len(gaps)} gaps")
        if not all(gap >= 0 for gap in gaps):
            raise ValueError(f"output {index} has a gap that is negative or NaN")
    positions = sum(len(gaps) for gaps in top2_gaps)
    near_ties = sum(gap < NEAR_TIE_GAP for gaps in top2_gaps for gap in gaps)
    return Hardness(
        near_tie_fraction=near_ties / positions,
        periods=tuple(_period(tokens[-PERIOD_WINDOW:]) for tokens in outputs),
        distinct_fraction=median(len(set(tokens)) / len(tokens) for tokens in outputs),
        acceptance=acceptance,
    )


def _period(tokens: Sequence[int]) -> int | None:
    """Smallest p <= MAX_PERIOD with tokens[i] == tokens[i - p] for every i >= p, else None."""
    for period in range(1, MAX_PERIOD + 1):
        if all(tokens[i] == tokens[i - period] for i in range(period, len(tokens))):
            return period
    return None
