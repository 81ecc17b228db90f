"""How many state slots a request holds: as many as the drafts it may still have to verify.

vLLM reserves a slot of recurrent state for each draft of the deepest schedule entry, for every
request. Under a schedule most requests of a large batch never verify one. Here a request that is
n-th in the batch gets what the deepest draft needs for n and every larger number of requests, and
more when it moves up and there is room. What a step verifies has slots in any case. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Sequence


def reserved_depths(depths: Sequence[int]) -> list[int]:
    """The deepest draft still possible for each number of requests and every larger one.

    Args:
        depths: Depth by number of requests; index 0 means nothing.
    """
    reserved = list(depths)
    for n in range(len(reserved) - 2, 0, -1):
        reserved[n] = max(reserved[n], reserved[n + 1])
    return reserved


def state_blocks(depths: Sequence[int], users: int) -> int:
    """State slots that ``users`` requests hold in each group of recurrent layers.

    Args:
        depths: Depth by number of requests; index 0 means nothing.
        users: Requests, all past their prompts, at most ``len(depths) - 1``.
    """
    return users + sum(reserved_depths(depths)[1 : users + 1])


def deepest_that_fits(needs: Sequence[int], free: int) -> int:
    """The most drafts that can be verified without preempting anyone for it.

    Args:
        needs: Blocks that the running requests need besides theirs, by depth from 0; ascending.
        free: Free blocks.

    Returns:
        A depth; 0 also where even that does not fit, which is the scheduler's to solve.
    """
    return max([depth for depth, need in enumerate(needs) if need <= free], default=0)
