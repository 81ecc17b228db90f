"""Compares two sets of answers, token by token and logprob by logprob."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from vllm_b70.harness.client import Completion

T = TypeVar("T")


@dataclass(frozen=True)
class Divergence:
    """Where one sequence first differs.

    Attributes:
        prompt: index of the prompt.
        position: index of the first differing generated token.
        expected_token: the oracle's token; None when its answer had ended.
        got_token: the token under test; None when the answer had ended.
        expected_logprob: logprob of ``expected_token`` in the oracle's answer.
        got_logprob: logprob of ``got_token`` in the answer under test.
    """

    prompt: int
    position: int
    expected_token: int | None
    got_token: int | None
    expected_logprob: float | None
    got_logprob: float | None

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}, position {self.position}: "
            f"expected {_token(self.expected_token, self.expected_logprob)}, "
            f"got {_token(self.got_token, self.got_logprob)}"
        )


@dataclass(frozen=True)
class Comparison:
    """The outcome of comparing one set of answers with the oracle's.

    Attributes:
        sequences: number of sequences compared.
        mismatches: sequences whose token ids differ.
        logprob_mismatches: sequences with at least one chosen token's logprob not equal as a
            float, before the first differing token (behind it, the contexts differ).
        divergences: first differing token of every mismatching sequence, in prompt order.
    """

    sequences: int
    mismatches: int
    logprob_mismatches: int
    divergences: list[Divergence]

    def __str__(self) -> str:
        head = (
            f"{self.mismatches} of {self.sequences} sequences differ in tokens, "
            f"{self.logprob_mismatches} in logprobs"
        )
        return "\n".join([head, *(f"  {divergence}" for divergence in self.divergences)])


def compare(expected: Sequence[Completion], got: Sequence[Completion]) -> Comparison:
    """Compare answers in prompt order.

    Raises:
        ValueError: nothing to compare, or the two sides answer different numbers of prompts.
    """
    if len(expected) != len(got):
        raise ValueError(f"cannot compare {len(expected)} answers with {len(got)}")
    if not expected:
        raise ValueError("there are no answers to compare; that would prove nothing")
    divergences = []
    logprob_mismatches = 0
    for index, (left, right) in enumerate(zip(expected, got, strict=True)):
        position = _first_difference(left.token_ids, right.token_ids)
        if position is not None:
            divergences.append(
                Divergence(
                    prompt=index,
                    position=position,
                    expected_token=_at(left.token_ids, position),
                    got_token=_at(right.token_ids, position),
                    expected_logprob=_at(left.logprobs, position),
                    got_logprob=_at(right.logprobs, position),
                )
            )
        if left.logprobs[:position] != right.logprobs[:position]:
            logprob_mismatches += 1
    return Comparison(
        sequences=len(expected),
        mismatches=len(divergences),
        logprob_mismatches=logprob_mismatches,
        divergences=divergences,
    )


def token_hash(completions: Sequence[Completion]) -> str:
    """Return the SHA-256 (hexadecimal) over all token ids in prompt order.

    Each sequence is preceded by its length, so that no token can move between sequences unseen.
    """
    digest = hashlib.sha256()
    for completion in completions:
        for value in (len(completion.token_ids), *completion.token_ids):
            digest.update(value.to_bytes(8, "little"))
    return digest.hexdigest()


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def _at(values: Sequence[T], position: int) -> T | None:
    return values[position] if position < len(values) else None


def _token(token: int | None, logprob: float | None) -> str:
    return "the end" if token is None else f"token {token} (logprob {logprob!r})"
