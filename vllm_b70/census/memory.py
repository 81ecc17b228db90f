"""How much memory of the device a probe may take: what is left beside the weights."""

from __future__ import annotations

import gc

import torch

from vllm_b70.census.ranks import least

#: Bytes that the inputs of a call, or its results, may have at most.
MOST = 2**29
#: Times as much that a judge holds of them, with what the op needs for itself; a judge of steps has
#: a cache of half of that.
HELD, CACHE = 8, 4


def budget(free: int) -> int:
    """Bytes that the inputs of a call, or its results, may have.

    A power of two, because it is part of a certificate's key and what is free differs a little from
    start to start.

    Args:
        free: Bytes of the device that nobody uses.
    """
    share = free // HELD
    return min(MOST, 1 << (share.bit_length() - 1)) if share else 0


def of_device(device: torch.device) -> int:
    """``budget`` of a device as it is now, the same on every rank; waits for the device."""
    if device.type == "cpu":
        return MOST
    release(device)
    free, _ = torch.accelerator.get_memory_info(device)
    return budget(least(int(free)))


def release(device: torch.device) -> None:
    """Give back what torch keeps for later, so that it counts as free."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
