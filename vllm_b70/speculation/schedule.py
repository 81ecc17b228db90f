"""Draft depth by batch size: ``num_speculative_tokens_per_batch_size``, checked before the start.

vLLM fills gaps with the depth before them and lowers a depth that is too large without a word, so
that a typing mistake serves something else than what was written. Here it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence


class ScheduleError(ValueError):
    """A schedule of draft depths that does not say one depth for every batch size."""


def check_schedule(schedule: Sequence[Sequence[int]], max_depth: int) -> None:
    """Check a schedule. Past its last entry the last depth goes on, as vLLM documents.

    Args:
        schedule: Entries ``[first, last, depth]``: with ``first`` to ``last`` requests in a step,
            ``depth`` draft tokens each.
        max_depth: ``num_speculative_tokens``, the depth that state is allocated for.

    Raises:
        ScheduleError: There are no entries, or they do not start at 1, overlap, leave a gap or have
            a depth outside 0 to ``max_depth``.
    """
    if not schedule:
        raise _error("it is empty")
    expected = 1
    for entry in schedule:
        if len(entry) != 3:
            raise _error(f"entry {list(entry)} is not [first, last, depth]")
        first, last, depth = entry
        if first > last:
            raise _error(f"entry {list(entry)} ends before it begins")
        if expected == 1 and first != 1:
            raise _error(f"it starts at {first} requests, not at 1")
        if first < expected:
            raise _error(
                f"entry {list(entry)} overlaps the one before it, which ends at {expected - 1}"
            )
        if first > expected:
            raise _error(f"it says nothing of {expected} to {first - 1} requests")
        if not 0 <= depth <= max_depth:
            raise _error(
                f"entry {list(entry)} has depth {depth}, outside 0 to "
                f"num_speculative_tokens={max_depth}"
            )
        expected = last + 1


def check_graphs(schedule: Sequence[Sequence[int]], max_requests: int, largest: int) -> None:
    """Check that every depth has a captured graph for its smallest batch at least.

    Args:
        schedule: Entries as ``check_schedule`` takes them.
        max_requests: ``max_num_seqs``; entries beyond it are not served.
        largest: Rows of the largest captured graph.

    Raises:
        ScheduleError: All steps of an entry would run without a graph.
    """
    for first, _, depth in schedule:
        rows = first * (depth + 1)
        if first <= max_requests and rows > largest:
            raise ScheduleError(
                f"{depth} draft tokens for {first} requests make steps of {rows} rows, and the "
                f"largest captured graph has {largest}, so they would run without one: raise "
                "--max-cudagraph-capture-size (or cudagraph_capture_sizes) to "
                f"{rows} or more, or lower the depth."
            )


def depth_by_batch(schedule: Sequence[Sequence[int]], max_requests: int) -> list[int]:
    """The depth for each number of requests; index 0 means nothing.

    Args:
        schedule: Entries as ``check_schedule`` takes them.
        max_requests: ``max_num_seqs``.
    """
    depths = [0]
    for _, last, depth in schedule:
        depths += [depth] * (last + 1 - len(depths))
    depths += [depths[-1]] * (max_requests + 1 - len(depths))
    return depths[: max_requests + 1]


def _error(reason: str) -> ScheduleError:
    return ScheduleError(
        f"num_speculative_tokens_per_batch_size cannot be used: {reason}; give one depth for every "
        "batch size from 1 on, for example [[1,4,3],[5,8,1],[9,64,0]]."
    )
