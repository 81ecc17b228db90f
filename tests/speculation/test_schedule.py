"""A schedule says one depth for every batch size, or it is refused before the engine starts."""

import pytest

from vllm_b70.speculation.schedule import (
    ScheduleError,
    check_graphs,
    check_schedule,
    depth_by_batch,
)


@pytest.mark.parametrize(
    "schedule",
    [
        [[1, 4, 3], [5, 8, 1], [9, 64, 0]],
        [(1, 32, 3)],
        [[1, 1, 0], [2, 2, 3], [3, 100, 2]],
    ],
)
def test_good_schedules(schedule):
    check_schedule(schedule, 3)


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ([], "it is empty"),
        ([[2, 64, 3]], "it starts at 2 requests, not at 1"),
        ([[0, 64, 3]], "it starts at 0 requests, not at 1"),
        ([[1, 4, 3], [4, 64, 1]], r"\[4, 64, 1\] overlaps the one before it, which ends at 4"),
        ([[1, 8, 3], [2, 4, 1]], "overlaps"),
        ([[1, 4, 3], [6, 64, 1]], "nothing of 5 to 5 requests"),
        ([[1, 4, 3], [9, 64, 1]], "nothing of 5 to 8 requests"),
        ([[1, 4, 4], [5, 64, 1]], "depth 4, outside 0 to num_speculative_tokens=3"),
        ([[1, 64, -1]], "depth -1"),
        ([[4, 1, 3]], "ends before it begins"),
        ([[1, 64]], r"\[1, 64\] is not \[first, last, depth\]"),
    ],
)
def test_bad_schedules_say_why(schedule, reason):
    with pytest.raises(ScheduleError, match=reason):
        check_schedule(schedule, 3)


@pytest.mark.parametrize("schedule", [[[1, 2, 3], [3, 4, 1], [5, 5, 0]], [[1, 99, 2]]])
def test_the_depth_for_each_batch_is_vllms(schedule):
    dynamic = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    expected = dynamic.build_dynamic_sd_schedule_lookup(schedule, 8, 3)
    assert depth_by_batch(schedule, 8) == expected


def test_a_depth_beyond_the_captured_graphs_is_refused():
    schedule = [[1, 8, 3], [9, 16, 1], [17, 64, 0]]
    check_graphs(schedule, 64, 32)
    check_graphs(schedule, 8, 4)  # more than 8 requests are never served
    with pytest.raises(ScheduleError, match=r"1 draft tokens for 9 requests make steps of 18 rows"):
        check_graphs(schedule, 64, 17)
    with pytest.raises(ScheduleError, match="to 8 or more, or lower the depth"):
        check_graphs([[1, 64, 7]], 64, 4)
