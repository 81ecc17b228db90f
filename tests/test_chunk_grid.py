"""The chunk grid: admissible ends only, and always progress."""

import pytest

from vllm_b70.chunk_grid import GRID, check_chunk, chunk_tokens, least_batched_tokens


@pytest.mark.parametrize(
    ("start", "offered", "prompt", "taken"),
    [
        (0, 1, 1, 1),  # the whole prompt, shorter than the grid
        (0, 63, 64, 0),  # neither the grid nor the end is within reach
        (0, 64, 65, 64),
        (0, 65, 65, 65),
        (0, 200, 500, 192),
        (64, 1, 65, 1),  # a last chunk of one token
        (64, 100, 500, 64),
        (192, 512, 200, 8),
        (0, 0, 10, 0),
        (200, 1, 200, 1),  # decode
        (200, 4, 200, 4),  # verification
        (0, 500, 200, 200),  # resumed: the output is another chunk than the prompt
        (200, 48, 200, 48),  # replay of the output in one piece
    ],
)
def test_examples(start, offered, prompt, taken):
    assert chunk_tokens(start, offered, prompt) == taken


@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 128, 300])
@pytest.mark.parametrize("total", [300, 340])
@pytest.mark.parametrize("offer", [64, 65, 100, 127, 512])
def test_any_offer_of_a_grid_or_more_reaches_the_end_through_admissible_cuts(prompt, total, offer):
    position = 0
    while position < total:
        tokens = chunk_tokens(position, min(offer, total - position), prompt)
        assert tokens > 0
        end = position + tokens
        assert position >= prompt or end == prompt or (end < prompt and end % GRID == 0)
        position = end
    assert position == total


def test_an_off_grid_chunk_is_an_error():
    check_chunk(0, 10)
    check_chunk(128, 1)
    with pytest.raises(RuntimeError, match="position 100, which is not a multiple of 64"):
        check_chunk(100, 20)


def test_least_batched_tokens_lets_a_prompt_advance_beside_full_decodes():
    least = least_batched_tokens(32, 3)
    assert least == 32 * 4 + 64
    assert chunk_tokens(64, least - 32 * 4, 1000) > 0
    assert chunk_tokens(64, least - 32 * 4 - 1, 1000) == 0
