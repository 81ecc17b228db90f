"""Which draft depth for how many users: a model of a few measurements, and its best schedule.

The model: at depth K a request gets ``1 + a_1 + ... + a_K`` tokens a step, where a_i is the share
of drafts whose i-th token is accepted; a step's time lies on straight lines between the measured
numbers of users, one line for each depth. Tokens a second follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measurement:
    """One server of a fixed depth with so many users.

    Attributes:
        depth: Draft tokens of each step; 0 without speculation.
        users: Requests in flight.
        tokens_per_s: Tokens of all users together.
        acceptance: For each draft position, accepted tokens per draft, 0 to 1.
    """

    depth: int
    users: int
    tokens_per_s: float
    acceptance: list[float] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gets in a step."""
        return 1 + sum(self.acceptance[: self.depth])

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.users * self.tokens_per_step / self.tokens_per_s


class DepthModel:
    """Tokens a second at any number of users, from measurements.

    Raises:
        ValueError: There is nothing to choose from, or a measurement is not a speed.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        if not measurements:
            raise ValueError("there is no measurement to choose a depth from")
        if bad := [m for m in measurements if m.tokens_per_s <= 0 or m.users < 1]:
            raise ValueError(f"{bad[0]} is not a measured speed")
        self.lines: dict[int, list[Measurement]] = {}
        for m in sorted(measurements, key=lambda m: (m.depth, m.users)):
            self.lines.setdefault(m.depth, []).append(m)

    def tokens_per_s(self, depth: int, users: int) -> float:
        """Tokens of all users together; outside the measured users the nearest line goes on."""
        line = self.lines[depth]
        step_s = _straight([m.users for m in line], [m.step_s for m in line], users)
        per_step = _straight([m.users for m in line], [m.tokens_per_step for m in line], users)
        return users * per_step / step_s

    def best(self, users: int) -> int:
        """The depth of most tokens a second; of equals the smallest."""
        return max(sorted(self.lines), key=lambda depth: self.tokens_per_s(depth, users))

    def schedule(self, max_users: int) -> list[list[int]]:
        """``num_speculative_tokens_per_batch_size`` for 1 to ``max_users`` requests."""
        entries: list[list[int]] = []
        for users in range(1, max_users + 1):
            depth = self.best(users)
            if entries and entries[-1][2] == depth:
                entries[-1][1] = users
            else:
                entries.append([users, users, depth])
        return entries


def _straight(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """y at x on the lines through the points, never below a tenth of the lowest y."""
    if len(xs) == 1:
        return ys[0]
    i = min(max(sum(known < x for known in xs), 1), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return max(ys[i] + slope * (x - xs[i]), min(ys) / 10)
