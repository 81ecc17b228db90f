"""Seeded prompts made of raw token ids, so that no tokenizer stands between two runs."""

from __future__ import annotations

import random
from collections.abc import Sequence


def make_prompts(
    lengths: Sequence[int], seed: int, token_range: tuple[int, int]
) -> list[list[int]]:
    """Return one random prompt per entry of ``lengths``.

    Args:
        lengths: prompt lengths in tokens, each at least 1.
        seed: the same seed gives the same prompts in every process.
        token_range: lowest token id, and the id one past the highest.

    Raises:
        ValueError: a length below 1, or a range that is empty or starts below 0.
    """
    low, high = token_range
    if low < 0 or high <= low:
        raise ValueError(f"token range {low}..{high} is empty or starts below 0")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"prompt {index} has length {length}; the shortest prompt is 1 token")
    # Random is seeded with an integer: that path does not go through hash().
    rng = random.Random(int(seed))
    return [[rng.randrange(low, high) for _ in range(length)] for length in lengths]


def default_lengths(
    count: int, seed: int, *, longest: int, block: int, also: Sequence[int] = ()
) -> list[int]:
    """Return ``count`` prompt lengths from 1 to ``longest`` tokens, in a seeded order.

    Both ends are always present, so one prompt is longer than a KV block. Eight or more lengths
    also hold the three around the block's edge, where chunking mistakes show first.

    Args:
        count: number of lengths, at least 2.
        seed: fixes the lengths and their order.
        longest: greatest length in tokens.
        block: tokens in a KV block; must be less than ``longest``.
        also: lengths to have among them where ``count`` leaves room: at least half of the lengths
            stay spread.

    Raises:
        ValueError: fewer than 2 lengths, or ``longest`` not above ``block``.
    """
    if count < 2:
        raise ValueError(f"{count} prompts cannot span a range of lengths; ask for at least 2")
    if block < 1 or longest <= block:
        raise ValueError(
            f"the longest prompt ({longest} tokens) must exceed a KV block ({block} tokens)"
        )
    rng = random.Random(int(seed))
    lengths = []
    for stratum in range(count):
        # The square favours short prompts: prefill ends sooner and more requests decode together,
        # which is the situation under test.
        part = ((stratum + rng.random()) / count) ** 2
        lengths.append(1 + int((longest - 1) * part))
    lengths[0], lengths[-1] = 1, longest
    if count >= 8:
        edge = [length for length in (block - 1, block, block + 1) if length >= 1]
        start = count // 2
        lengths[start : start + len(edge)] = edge
        wanted = [length for length in also if length <= longest and length not in lengths]
        wanted = wanted[: max(0, start - 1)]
        # In place of the shortest, which lie closest together.
        lengths[1 : 1 + len(wanted)] = wanted
    rng.shuffle(lengths)
    return lengths
