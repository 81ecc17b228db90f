"""What the ranks of a tensor-parallel server agree on, so that all of them ask the same."""

from __future__ import annotations

import torch
from vllm.distributed import parallel_state


def least(value: int) -> int:
    """The least of a value over the ranks; every rank must call it."""
    if not parallel_state.model_parallel_is_initialized():
        return value
    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return value
    shared = torch.tensor(value, dtype=torch.int64)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(shared)
