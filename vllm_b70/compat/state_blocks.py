"""Patch: the scheduler's cache manager reserves recurrent state by the depth of the drafts.

what      the scheduler's instances of KVCacheManager (allocate_slots) and MambaManager
why       vLLM 0.32 reserves state for num_speculative_tokens drafts for every request, whatever
          the schedule says
upstream  not reported yet
versions  0.32
remove    when vLLM reserves by the schedule; tests/scheduling/test_state_blocks.py fails then
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import MambaManager

from vllm_b70.compat.seams import require

require("allocate_slots", "state_blocks", "state_blocks_allocate")


class DepthMambaManager(MambaManager):
    """Reserves ``num_speculative_blocks`` slots, which may change; admits by the deepest draft."""

    num_speculative_blocks: int

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> int:
        now = self.num_speculative_blocks
        if kwargs.get("apply_admission_cap"):
            self.num_speculative_blocks = self.kv_cache_spec.num_speculative_blocks
        try:
            return super().get_num_blocks_to_allocate(*args, **kwargs)
        finally:
            self.num_speculative_blocks = now


def apply(manager: Any, depth_of: Callable[[Any, int], tuple[int, int]]) -> list[Any]:
    """Let a scheduler's cache manager ask for the depth to reserve state for.

    Args:
        manager: A ``KVCacheManager``.
        depth_of: Given a request and the tokens it is to compute, the depth to reserve state for,
            and the depth without which it cannot be computed; called before each allocation.

    Returns:
        The managers of the groups of recurrent layers. Without any, nothing is changed.
    """
    states = [m for m in manager.coordinator.single_type_managers if isinstance(m, MambaManager)]
    if not states:
        return []
    for state in states:
        state.__class__ = DepthMambaManager
    original = manager.allocate_slots

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        wanted, needed = depth_of(request, num_new_tokens)
        for depth in sorted({wanted, needed}, reverse=True):
            for state in states:
                state.num_speculative_blocks = depth
            blocks = original(request, num_new_tokens, *args, **kwargs)
            if blocks is not None:
                break
        return blocks

    manager.allocate_slots = allocate_slots
    return states
