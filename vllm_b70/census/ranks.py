"""What the ranks of a tensor-parallel server agree on, so that all of them ask the same."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import parallel_state


def of_all(value: Any) -> list[Any]:
    """A value of each rank, in their order; every rank must call it."""
    if not parallel_state.model_parallel_is_initialized():
        return [value]
    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return [value]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def least(value: int) -> int:
    """The least of a value over the ranks; every rank must call it."""
    return int(min(of_all(value)))
