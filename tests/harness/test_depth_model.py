"""The schedule of most tokens a second, on data with a known optimum."""

import pytest

from vllm_b70.harness.depth_model import DepthModel, Measurement


def measured(depth, users, step_ms, acceptance=()):
    """What a server with this step time gives."""
    per_step = 1 + sum(acceptance)
    return Measurement(depth, users, users * per_step / (step_ms * 1e-3), list(acceptance))


def model():
    """Depth 0: 10 ms + 0.1 a user; depth 1: 12 ms + 0.4 a user and 0.8 accepted. They give the same
    where 1.8 / (12 + 0.4 n) = 1 / (10 + 0.1 n), at n = 27.3."""
    found = [measured(0, n, 10 + 0.1 * n) for n in (1, 16, 64)]
    return DepthModel(found + [measured(1, n, 12 + 0.4 * n, [0.8]) for n in (1, 16, 64)])


def test_the_schedule_changes_where_the_lines_cross():
    assert model().schedule(64) == [[1, 27, 1], [28, 64, 0]]


def test_the_model_passes_through_what_was_measured():
    for users in (1, 16, 64):
        assert model().tokens_per_s(1, users) == pytest.approx(users * 1.8 / (12e-3 + 4e-4 * users))


def test_between_the_measured_users_the_step_time_is_straight():
    assert model().tokens_per_s(0, 40) == pytest.approx(40 / 14e-3)


def test_of_equal_depths_the_smallest_is_taken():
    best = DepthModel([measured(0, 1, 10), measured(1, 1, 20, [1.0])])
    assert best.schedule(3) == [[1, 3, 0]]


def test_a_depth_measured_once_serves_every_number_of_users():
    assert DepthModel([measured(2, 8, 10, [0.5, 0.2])]).schedule(64) == [[1, 64, 2]]


@pytest.mark.parametrize("bad", [[], [Measurement(0, 1, 0.0)], [Measurement(0, 0, 5.0)]])
def test_what_is_no_measurement_is_refused(bad):
    with pytest.raises(ValueError):
        DepthModel(bad)


def test_a_schedule_is_one_that_vllm_takes():
    from vllm_b70.speculation.schedule import check_schedule

    check_schedule(model().schedule(64), 1)
