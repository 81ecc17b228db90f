"""When the draft layer is skipped, and how much is caught up: the rule, without a model."""

from vllm_b70.speculation.draft_lag import DraftLag


def test_only_narrow_steps_past_the_prompts_are_skipped():
    lag = DraftLag(3)
    assert lag.step(["a", "b"], [1, 4], [False, False], 0).skip
    assert not lag.step(["a", "b"], [1, 1], [False, False], 1).skip
    assert not lag.step(["a", "b"], [1, 64], [False, True], 0).skip
    assert not lag.step(["a"], [5], [False], 0).skip, "a replay after preemption"


def test_what_was_skipped_is_replayed_once_and_up_to_the_window():
    lag = DraftLag(3, window=10)
    for _ in range(4):
        lag.step(["a", "b"], [1, 4], [False, False], 0)
    assert lag.step(["b"], [1], [False], 2).replay == [10]
    assert lag.step(["a", "b"], [1, 3], [False, False], 2).replay == [4, 0]
    assert lag.step(["a", "b"], [3, 3], [False, False], 2).replay == [0, 0]


def test_a_step_that_ran_at_depth_0_moves_the_gap_back():
    lag = DraftLag(3)
    lag.step(["a"], [1], [False], 0)
    step = lag.step(["a", "new"], [1, 64], [False, True], 0)
    assert (step.skip, step.replay, step.begun) == (False, [0, 0], [1])
    assert lag.step(["a", "new"], [1, 1], [False, False], 1).replay == [2, 0]


def test_a_prompt_or_an_end_voids_the_gap():
    lag = DraftLag(3)
    lag.step(["a", "b"], [1, 1], [False, False], 0)
    assert lag.step(["a"], [64], [True], 3).replay == [0]
    lag.forget("b")
    assert lag.step(["a", "b"], [1, 1], [False, False], 3).replay == [0, 0]
