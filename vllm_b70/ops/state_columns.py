"""The device's record of where recurrent states are kept; see layers.state_columns."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_b70.ops.launcher import Launcher


class StateRecord:
    """What one KV-cache group keeps, by slot of a request's column 0.

    Attributes:
        first, count: [slots] int32: column c holds the state after ``first + c`` tokens, for
            c < count.
        lost: [1] int32, how many requests asked for a state that was not kept.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.first = torch.zeros(slots, dtype=torch.int32, device=device)
        self.count = torch.zeros(slots, dtype=torch.int32, device=device)
        self.lost = torch.zeros(1, dtype=torch.int32, device=device)


@functools.cache
def _launcher(kernel: Any, table_row: int, columns: int, mixed: bool) -> Launcher:
    """The kernel with its constants."""
    return Launcher(
        kernel,
        dict(
            TABLE_ROW=table_row,
            COLUMNS=columns,
            BC=1 << (columns - 1).bit_length(),
            MIXED=mixed,
            num_warps=1,
        ),
    )


def place_states(
    record: StateRecord,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    in_prompt: torch.Tensor | None,
    starts: torch.Tensor,
    read: torch.Tensor,
    columns: torch.Tensor,
) -> None:
    """Where each request continues from and leaves its states; called once a step, in order.

    Args:
        record: Updated.
        query_starts: [R + 1] int32, where each request's rows start.
        seq_lens: [R] int32, the position after its last row.
        table: [R, C] int32, its state slots, column 0 first; rows may be strided. Column 0 of a
            padding request is slot 0.
        in_prompt: [R] int32, 1 for a prompt chunk; None when there is none.
        starts: [R + 1] int32, filled with ``query_starts``.
        read: [R] int32, filled with what ``recurrent_steps`` takes; 0 for prompt chunks, -1 for
            those whose state is lost.
        columns: [R, C] int32 contiguous, filled with ``table``.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    from vllm_b70.kernels import state_columns as kernels

    requests, width = table.shape
    if table.stride(1) != 1 or columns.shape != table.shape or not columns.is_contiguous():
        raise ValueError(f"table {(*table.shape,)} and columns {(*columns.shape,)} do not fit")
    for name, tensor, length in (
        ("query_starts", query_starts, requests + 1),
        ("seq_lens", seq_lens, requests),
        ("starts", starts, requests + 1),
        ("read", read, requests),
        ("in_prompt", in_prompt, requests),
    ):
        if tensor is not None and (tensor.shape != (length,) or tensor.dtype != torch.int32):
            raise ValueError(f"{name} must be int32 [{length}], not {(*tensor.shape,)}")
    if requests == 0:
        return
    _launcher(kernels.place, table.stride(0), width, in_prompt is not None)(
        (requests,),
        (query_starts, seq_lens, table, read if in_prompt is None else in_prompt,
         record.first, record.count, starts, read, columns, record.lost),
    )  # fmt: skip
