"""The last inputs of the draft layer, kept while it is skipped.

The draft layer's keys and values at a position follow from the target's hidden state there, the
token after it and the position alone, for there is one layer and its keys are made before its
attention. So a position is replayed from these, in any order and company, and twice does no harm.
"""

from __future__ import annotations

import torch


class DraftHistory:
    """A ring of positions for each slot, on the device.

    Args:
        slots: Requests that may be followed at a time.
        length: Positions kept of each.
        hidden_size: Values of a hidden state.
        dtype: Of the hidden states.
        device: Where they lie.
        axes: Rotary positions of a token: 1, or 3 with M-RoPE.
    """

    def __init__(
        self,
        slots: int,
        length: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        axes: int = 1,
    ) -> None:
        self._length = length
        self._position = torch.full((slots, length), -1, dtype=torch.int64, device=device)
        self._token = torch.zeros(slots * length, dtype=torch.int64, device=device)
        self._rotary = torch.zeros((slots * length, axes), dtype=torch.int64, device=device)
        self._hidden = torch.zeros((slots * length, hidden_size), dtype=dtype, device=device)

    @staticmethod
    def size(slots: int, length: int, hidden_size: int, dtype: torch.dtype, axes: int = 1) -> int:
        """Bytes of a history; arguments as for the class."""
        return slots * length * (8 * (2 + axes) + hidden_size * dtype.itemsize)

    def record(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        rotary: torch.Tensor,
        hidden: torch.Tensor,
        accepted: torch.Tensor | None = None,
    ) -> None:
        """Keep rows; a position that is there already is replaced. Never waits for the device.

        A rejected row is not kept: the step that computes its position anew may be one that runs
        the draft layer and records nothing, and a replay would write the draft over it.

        Args:
            slots: [T] int64.
            positions: [T] int64, where the row's hidden state belongs.
            tokens: [T], the token after each.
            rotary: [T] or [axes, T], the rotary positions.
            hidden: [T, hidden_size].
            accepted: [T] bool, false for rejected rows, or None if there are none.
        """
        at = slots * self._length + positions % self._length
        kept = positions if accepted is None else positions.masked_fill(~accepted, -1)
        self._position.view(-1)[at] = kept
        self._token[at] = tokens.long()
        self._rotary[at] = rotary.reshape(-1, rotary.shape[-1]).t().long()
        self._hidden[at] = hidden

    def forget(self, slots: torch.Tensor) -> None:
        """Void what is kept of these slots, [N] int64."""
        self._position[slots] = -1

    def recall(
        self, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Look rows up.

        Args:
            slots, positions: [N] int64.

        Returns:
            Whether each is kept [N], tokens [N] int64, rotary positions [axes, N] int64 and hidden
            states [N, hidden_size]; of a row that is not kept they mean nothing.
        """
        at = slots * self._length + positions % self._length
        kept = (positions >= 0) & (self._position.view(-1)[at] == positions)
        return kept, self._token[at], self._rotary[at].t().contiguous(), self._hidden[at]


def kv_slots(
    block_table: torch.Tensor, owners: torch.Tensor, positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Where positions stand in the KV cache.

    Args:
        block_table: [R, blocks] int32.
        owners: [N] int64, rows of it.
        positions: [N] int64; negative ones give a slot that means nothing.
        block_size: Tokens of a block.

    Returns:
        [N] int64.
    """
    at = positions.clamp(min=0)
    return block_table[owners, at // block_size].long() * block_size + at % block_size
