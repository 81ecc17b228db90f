from collections.abc import Callable

import pytest

from vllm_b70.harness.client import Completion
from vllm_b70.harness.compare import Divergence, compare, token_hash

Make = Callable[..., Completion]


def test_equal_answers(completion: Make) -> None:
    answers = [completion([1, 2]), completion([3, 4])]
    outcome = compare(answers, answers)
    assert (outcome.sequences, outcome.mismatches, outcome.logprob_mismatches) == (2, 0, 0)
    assert outcome.divergences == []
    assert str(outcome) == "0 of 2 sequences differ in tokens, 0 in logprobs"


def test_the_first_differing_token_is_reported(completion: Make) -> None:
    expected = [completion([1, 2]), completion([3, 4, 5], [-0.1, -0.2, -0.3])]
    got = [completion([1, 2]), completion([3, 9, 8], [-0.1, -0.7, -0.8])]
    outcome = compare(expected, got)
    assert (outcome.mismatches, outcome.logprob_mismatches) == (1, 0)
    assert outcome.divergences == [Divergence(1, 1, 4, 9, -0.2, -0.7)]
    assert "prompt 1, position 1: expected token 4 (logprob -0.2), got token 9" in str(outcome)


@pytest.mark.parametrize("swap", [False, True])
def test_a_shorter_answer_is_a_mismatch(completion: Make, swap: bool) -> None:
    pair = [completion([1, 2, 3])], [completion([1, 2])]
    outcome = compare(*(pair[::-1] if swap else pair))
    assert outcome.mismatches == 1
    (divergence,) = outcome.divergences
    assert divergence.position == 2
    tokens = (divergence.expected_token, divergence.got_token)
    assert tokens == ((None, 3) if swap else (3, None))
    assert "the end" in str(divergence)


def test_one_bit_of_a_logprob_counts(completion: Make) -> None:
    outcome = compare([completion([1], [-0.5])], [completion([1], [-0.5 - 2**-30])])
    assert (outcome.mismatches, outcome.logprob_mismatches) == (0, 1)


def test_logprobs_behind_the_first_difference_do_not_count(completion: Make) -> None:
    before = compare([completion([1, 2], [-0.1, -0.2])], [completion([1, 3], [-0.4, -0.3])])
    behind = compare([completion([1, 2], [-0.1, -0.2])], [completion([4, 2], [-0.1, -0.3])])
    assert (before.logprob_mismatches, behind.logprob_mismatches) == (1, 0)


def test_unequal_or_empty_sides_are_refused(completion: Make) -> None:
    with pytest.raises(ValueError, match="1 answers with 0"):
        compare([completion([1])], [])
    with pytest.raises(ValueError, match="prove nothing"):
        compare([], [])


def test_the_hash_depends_on_tokens_order_and_boundaries_only(completion: Make) -> None:
    base = token_hash([completion([1, 2]), completion([3])])
    assert base == token_hash([completion([1, 2], [-9.0, -9.0]), completion([3])])
    assert len(base) == 64
    others = [
        [completion([3]), completion([1, 2])],
        [completion([1]), completion([2, 3])],
        [completion([1, 2, 3])],
        [completion([1, 2]), completion([3]), completion([])],
    ]
    assert len({base, *(token_hash(other) for other in others)}) == 5
