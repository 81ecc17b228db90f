"""When a step may skip the draft layer, and what it has to catch up on later.

With depth 0 nobody reads what the draft layer computes: the step may leave it out, and its KV cache
then lacks the step's positions. The first step that drafts again replays them. Whether a request
has begun anew (another one in its slot, or itself after preemption) shows by its prompt, which is
never skipped. Standard library only: the scheduler counts with the same rule as the workers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

#: Positions before the current one that can be replayed. Earlier ones stay missing: the drafts of
#: that request are then worse, never its tokens.
WINDOW = 256


@dataclass(frozen=True)
class DraftStep:
    """What one step does with the draft layer.

    Attributes:
        skip: It does not run.
        replay: For each request of the step, how many positions before its first row are replayed.
        begun: Indices of the requests whose prompt this is: what was kept for them is void.
    """

    skip: bool
    replay: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)


class DraftLag:
    """How far behind the draft layer is for each request, by a key that is its own.

    Args:
        max_depth: Most drafts a step verifies.
        window: Most positions that are replayed.
    """

    def __init__(self, max_depth: int, window: int = WINDOW) -> None:
        self._widest, self._window = max_depth + 1, window
        self._lag: dict[Hashable, int] = {}

    def step(
        self,
        requests: Sequence[Hashable],
        widths: Sequence[int],
        in_prompt: Sequence[bool],
        depth: int,
    ) -> DraftStep:
        """Decide on one step, and record it.

        Args:
            requests: Keys of the step's requests.
            widths: Rows of each; rejected drafts among them make the lag an upper bound.
            in_prompt: Whether each one's first row lies in its prompt.
            depth: Drafts to make after this step.
        """
        begun = [i for i, inside in enumerate(in_prompt) if inside]
        for i in begun:
            self._lag.pop(requests[i], None)
        # A wide row past the prompt is a replay after preemption: it would overrun the window.
        if depth == 0 and not begun and max(widths, default=0) <= self._widest:
            for request, width in zip(requests, widths, strict=True):
                self._lag[request] = self._lag.get(request, 0) + width
            return DraftStep(skip=True)
        if depth == 0:
            # These rows are computed, but what was missing before them still is.
            for request, width in zip(requests, widths, strict=True):
                if request in self._lag:
                    self._lag[request] += width
            return DraftStep(skip=False, replay=[0] * len(requests), begun=begun)
        replay = [min(self._lag.pop(request, 0), self._window) for request in requests]
        return DraftStep(skip=False, replay=replay, begun=begun)

    def forget(self, request: Hashable) -> None:
        """A request is gone."""
        self._lag.pop(request, None)
