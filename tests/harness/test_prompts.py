import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_b70.harness.prompts import default_lengths, make_prompts

ROOT = Path(__file__).parents[2]


def test_prompts_have_the_lengths_and_stay_in_range() -> None:
    prompts = make_prompts([1, 400, 7], 3, (5, 9))
    assert [len(prompt) for prompt in prompts] == [1, 400, 7]
    assert {token for prompt in prompts for token in prompt} == {5, 6, 7, 8}


def test_seed_decides_prompts_and_lengths() -> None:
    assert make_prompts([9, 9], 1, (0, 1000)) == make_prompts([9, 9], 1, (0, 1000))
    assert make_prompts([9, 9], 1, (0, 1000)) != make_prompts([9, 9], 2, (0, 1000))
    assert default_lengths(9, 1, longest=300, block=64) == default_lengths(
        9, 1, longest=300, block=64
    )
    assert default_lengths(9, 1, longest=300, block=64) != default_lengths(
        9, 2, longest=300, block=64
    )


def test_hash_seed_does_not_matter() -> None:
    code = (
        "from vllm_b70.harness.prompts import *;"
        "print(make_prompts(default_lengths(8, 4, longest=99, block=16), 4, (1, 999)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("count", [2, 3, 8, 36, 200])
@pytest.mark.parametrize("block", [1, 2, 16, 64])
def test_lengths_span_one_to_longest(count: int, block: int) -> None:
    lengths = default_lengths(count, 0, longest=464, block=block)
    assert len(lengths) == count
    assert min(lengths) == 1
    assert max(lengths) == 464 > block


def test_many_lengths_hold_the_edge_of_a_block() -> None:
    lengths = default_lengths(36, 0, longest=464, block=64)
    assert {63, 64, 65} <= set(lengths)
    assert len(set(lengths)) > 25


@pytest.mark.parametrize(
    ("lengths", "token_range"), [([0], (0, 9)), ([1], (9, 9)), ([1], (-1, 9)), ([1, -2], (0, 9))]
)
def test_bad_prompts_are_refused(lengths: list[int], token_range: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        make_prompts(lengths, 0, token_range)


@pytest.mark.parametrize(("count", "longest"), [(1, 100), (8, 64), (8, 10)])
def test_bad_lengths_are_refused(count: int, longest: int) -> None:
    with pytest.raises(ValueError):
        default_lengths(count, 0, longest=longest, block=64)
