"""Where the recurrent state before a position is kept, from step to step."""

import pytest

from vllm_b70.layers.state_columns import StateColumns

SLOTS = [10, 11, 12, 13]  # depth 3


def prefilled(prompt=5, slots=SLOTS):
    columns = StateColumns()
    columns.prompt_chunk(slots, 0, prompt)
    return columns


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_the_next_step_reads_the_column_of_the_last_accepted_token(accepted):
    columns = prefilled(5)
    assert columns.advance(SLOTS, 5, 4) == (10, [10, 11, 12, 13])
    read, _ = columns.advance(SLOTS, 5 + accepted, 4)
    assert read == SLOTS[accepted - 1]


@pytest.mark.parametrize("widths", [(4, 1, 2, 4), (1, 4, 1), (2, 2, 3, 1)])
def test_the_width_may_change_between_steps(widths):
    columns, position, read = prefilled(), 5, 10
    for width in widths:
        got, write = columns.advance(SLOTS, position, width)
        assert got == read and write == SLOTS[:width]
        position, read = position + width, SLOTS[width - 1]  # every draft accepted


def test_without_speculation_there_is_one_column():
    columns = prefilled(slots=[7])
    for position in range(5, 9):
        assert columns.advance([7], position, 1) == (7, [7])


def test_replay_keeps_the_states_after_its_last_tokens_only():
    columns = prefilled()
    assert columns.advance(SLOTS, 5, 6) == (10, [-1, -1, 10, 11, 12, 13])
    assert columns.advance(SLOTS, 11, 1) == (13, [10])


def test_a_step_sat_out_changes_nothing():
    columns = prefilled()
    columns.advance(SLOTS, 5, 4)
    other = [20, 21, 22, 23]
    columns.prompt_chunk(other, 0, 64)
    columns.advance(other, 64, 4)
    assert columns.advance(SLOTS, 8, 4)[0] == 12


def test_a_reused_slot_is_forgotten_when_its_new_request_begins():
    columns = prefilled()
    columns.advance(SLOTS, 5, 4)
    columns.prompt_chunk([10, 30, 31, 32], 0, 64)
    columns.prompt_chunk([10, 30, 31, 32], 64, 10)
    assert columns.advance([10, 30, 31, 32], 74, 2) == (10, [10, 30])


def test_resumption_is_the_ordinary_rule():
    columns = prefilled(70)
    columns.advance(SLOTS, 70, 4)
    resumed = [40, 41, 42, 43]
    columns.prompt_chunk(resumed, 0, 64)
    columns.prompt_chunk(resumed, 64, 6)
    assert columns.advance(resumed, 70, 3) == (40, [40, 41, 42])
    assert columns.advance(resumed, 73, 4)[0] == 42


@pytest.mark.parametrize("start", [4, 9, 10])
def test_a_state_that_was_not_kept_is_an_error(start):
    columns = prefilled()
    columns.advance(SLOTS, 5, 3)  # keeps the states before 6, 7 and 8
    with pytest.raises(RuntimeError, match=f"before position {start} is gone"):
        columns.advance(SLOTS, start, 1)


def test_an_unknown_request_is_an_error():
    with pytest.raises(RuntimeError, match="kept: none"):
        StateColumns().advance(SLOTS, 3, 1)
    with pytest.raises(RuntimeError, match="kept: none"):
        StateColumns().prompt_chunk(SLOTS, 64, 1)
