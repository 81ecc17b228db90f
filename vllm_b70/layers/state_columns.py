"""Where the recurrent state before a position is kept.

A request owns one state slot per *column*: column 0, and one more per draft token that a step may
verify. After a step, the states after its last tokens stand in the columns in order. The next step
starts at the position after the last accepted token, and that position alone says which column
holds the state it needs. vLLM's count of accepted tokens is not used: it is kept by row of the
batch and is lost when a request sits a step out, is moved or is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Kept:
    """Column c holds the state after ``first + c`` tokens, for c < count."""

    first: int
    count: int


class StateColumns:
    """Follows the requests of one KV-cache group from step to step.

    A request is known by the slot of its column 0, which is its own for as long as it has it. A
    slot that is given to another request is forgotten when that request begins at position 0.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def prompt_chunk(self, slots: Sequence[int], start: int, tokens: int) -> int:
        """A chunk of a prompt: its state is read from and left in column 0.

        Args:
            slots: The request's slots, column 0 first.
            start: Position of the chunk's first token; 0 means that there is no earlier state.
            tokens: Tokens of the chunk.

        Returns:
            The slot to work in.

        Raises:
            RuntimeError: The state before ``start`` is not in column 0.
        """
        if start and self._column(slots, start):
            raise RuntimeError(f"the state before position {start} of a prompt is not in column 0")
        self._kept[slots[0]] = _Kept(start + tokens, 1)
        return slots[0]

    def advance(self, slots: Sequence[int], start: int, tokens: int) -> tuple[int, list[int]]:
        """Tokens past the prompt: decode, verification of any width, or replay.

        Args:
            slots: The request's slots, column 0 first.
            start: Position of the first token.
            tokens: Tokens of this step, at least 1.

        Returns:
            The slot to read, and for each token the slot for the state after it, or -1 where no
            later step can begin there.

        Raises:
            RuntimeError: The state before ``start`` was not kept.
        """
        read = slots[self._column(slots, start)]
        count = min(tokens, len(slots))
        self._kept[slots[0]] = _Kept(start + tokens - count + 1, count)
        return read, [-1] * (tokens - count) + list(slots[:count])

    def _column(self, slots: Sequence[int], start: int) -> int:
        kept = self._kept.get(slots[0])
        if kept is None or not 0 <= start - kept.first < kept.count:
            have = "none" if kept is None else f"{kept.first} to {kept.first + kept.count - 1}"
            raise RuntimeError(
                f"the recurrent state before position {start} is gone (kept: {have}): the request "
                "cannot be continued exactly; report this as a bug of vllm_b70."
            )
        return start - kept.first
