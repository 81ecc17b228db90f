"""Each bound of the hardness measure, met and missed."""

from __future__ import annotations

import math

import pytest

from vllm_b70.checkpoints.hardness import Hardness, measure

GOOD_OUTPUT = list(range(64))
GOOD_GAPS = [0.01] * 8 + [1.0] * 56


def good(acceptance: float | None = 0.5) -> Hardness:
    return measure([GOOD_OUTPUT, GOOD_OUTPUT], [GOOD_GAPS, GOOD_GAPS], acceptance)


def test_hard_model_has_no_failures() -> None:
    hardness = good()
    assert hardness == Hardness(0.125, (None, None), 1.0, 0.5)
    assert hardness.failures() == []
    assert good(None).failures() == []


def test_too_few_near_ties() -> None:
    gaps = [0.01] * 3 + [0.05] * 61  # a gap of exactly the bound is no near tie
    (failure,) = measure([GOOD_OUTPUT], [gaps], 0.5).failures()
    assert "0.0469" in failure and "0.05" in failure and failure.endswith(".")


def test_near_ties_exactly_at_the_bound_suffice() -> None:
    gaps = [0.0] * 2 + [1.0] * 38
    assert measure([list(range(40))], [gaps], None).failures() == []


@pytest.mark.parametrize("period", [1, 2, 15, 16])
def test_periodic_tail(period: int) -> None:
    output = list(range(100, 164)) + [index % period for index in range(32)]
    gaps = GOOD_GAPS + [0.01] * 32
    (failure,) = measure([GOOD_OUTPUT, output], [GOOD_GAPS, gaps], 0.5).failures()
    assert "output 1" in failure and f"period {period};" in failure and "16" in failure


def test_longer_period_and_earlier_loop_are_allowed() -> None:
    longer = list(range(100, 164)) + [index % 17 for index in range(32)]
    earlier = [1] * 32 + list(range(100, 164))
    gaps = GOOD_GAPS + [0.01] * 32
    assert measure([longer, earlier], [gaps, gaps], 0.5).failures() == []


def test_too_few_distinct_tokens() -> None:
    # 25 distinct tokens of 64; a period of 25 is long enough to be allowed
    output = [index % 25 for index in range(64)]
    (failure,) = measure([output] * 2 + [GOOD_OUTPUT], [GOOD_GAPS] * 3, 0.5).failures()
    assert "0.3906" in failure and "0.5" in failure


def test_distinct_uses_the_median_over_outputs() -> None:
    few = [index % 25 for index in range(64)]
    assert measure([few, GOOD_OUTPUT, GOOD_OUTPUT], [GOOD_GAPS] * 3, 0.5).failures() == []


@pytest.mark.parametrize("acceptance", [0.0, 0.05, 0.95, 1.0, math.nan])
def test_acceptance_must_be_strictly_inside(acceptance: float) -> None:
    (failure,) = good(acceptance).failures()
    assert f"{acceptance:.4f}" in failure and "0.05" in failure and "0.95" in failure


def test_every_failure_is_reported() -> None:
    assert len(measure([[7] * 40], [[1.0] * 40], 1.0).failures()) == 4


def test_unusable_input_is_refused() -> None:
    with pytest.raises(ValueError, match="no outputs"):
        measure([], [], None)
    with pytest.raises(ValueError, match="sequences of gaps"):
        measure([GOOD_OUTPUT], [], None)
    with pytest.raises(ValueError, match="at least 32"):
        measure([[1] * 31], [[0.0] * 31], None)
    with pytest.raises(ValueError, match="63 gaps"):
        measure([GOOD_OUTPUT], [GOOD_GAPS[:-1]], None)
    for bad in (-0.1, math.nan):
        with pytest.raises(ValueError, match="negative or NaN"):
            measure([GOOD_OUTPUT], [[*GOOD_GAPS[:-1], bad]], None)
