"""Who computes what in the Hopper kernel, for every program of many launches: no GPU is needed."""

import itertools

import pytest

from vllm_b70.kernels import hopper_schedule as schedule
from vllm_b70.ops import hopper, split

SHAPES = [(32, 2), (96, 8), (32, 3), (32, 4), (40, 3), (136, 8), (31, 3), (24, 8), (3, 1), (7, 2)]
COUNTS = [1, 2, 3, 4, 5, 7, 8, 13, 15, 29, 40, 64, 131, 132, 133, 160, 263, 264, 265, 544, 1000]


def programs_of(plan, count, groups, parts):
    """The segments of each program in its order, as the kernel finds them, and whether each is
    shared: tile, first, last, first and last of its piece, shared."""
    pieces = parts if plan.cut == "parts" else 1
    shared = count - plan.strided
    found = []
    for program in range(plan.programs):
        start, stop = (
            schedule.cut(p, plan.programs, shared, groups, pieces) for p in (program, program + 1)
        )
        whole = (plan.strided - program + plan.programs - 1) // plan.programs
        last_piece = schedule.piece_at(stop - 1, groups, pieces) if stop else 0
        segments = last_piece - schedule.piece_at(start, groups, pieces) + 1 if stop > start else 0
        found.append([])
        for i in range(-whole, segments):
            tile, first, last = schedule.segment(
                i, program, plan.programs, plan.strided, last_piece, start, stop, groups, pieces
            )
            piece = schedule.piece_at(first, groups, pieces)
            low, high = (p * groups // pieces for p in (piece, piece + 1))
            found[-1].append((tile, first, last, low, high, i >= 0))
    return found


CASES = list(itertools.product(SHAPES, ["", "tiles", "parts"], [1, 2, 7, 132]))


@pytest.mark.parametrize(("shape", "cut", "processors"), CASES, ids=str)
def test_every_group_once_and_in_order(shape, cut, processors):
    """And all that the kernel relies on: two groups a segment, one cut a piece, its first half the
    first segment of those shared of one program, its second the last of the next program."""
    groups, parts = shape
    for count in COUNTS:
        plan = hopper.share(cut, count, groups, parts, processors, 64)
        assert plan.programs <= processors
        done = {}
        found = programs_of(plan, count, groups, parts)
        for program, segments in enumerate(found):
            assert segments, "the kernel loads the words of the first one"
            shared = [s for s in segments if s[-1]]
            assert all((s[0] >= plan.strided) == s[-1] for s in segments)
            for i, (tile, first, last, low, high, _) in enumerate(segments):
                assert 0 <= low <= first and first + 2 <= last <= high <= groups
                if last < high:
                    assert segments[i] == shared[0] and first == low
                    assert found[program + 1][-1][:5] == (tile, last, high, low, high)
                if first > low:
                    assert i == len(segments) - 1 and last == high
                    before = [s for s in found[program - 1] if s[-1]]
                    assert before[0][:3] == (tile, low, first)
                done.setdefault(tile, []).append((first, last))
        assert sorted(done) == list(range(count))
        for ranges in done.values():
            ranges.sort()
            assert ranges[0][0] == 0 and ranges[-1][1] == groups
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize(("shape", "cut", "processors"), CASES, ids=str)
def test_no_program_waits_for_ever(shape, cut, processors):
    """All programs run at once, each to where it has to wait; until all are done. Counters are zero
    again, and no more of them and of the workspace are used than the launch provides."""
    groups, parts = shape
    for count in COUNTS:
        plan = hopper.share(cut, count, groups, parts, processors, 64)
        counters = [0] * (plan.counters // 2)
        base = count if plan.cut == "parts" else 0

        def actions(program, segments, plan=plan, counters=counters, count=count, base=base):
            """What the kernel does with the counters; what it yields must become true first."""
            for tile, first, last, low, high, _ in segments:
                if first > low:
                    at = base + program - 1
                    yield lambda at=at: counters[at] >= 1
                    leave(at, 1)
                if last < high:
                    counters[base + program] += 1
                elif plan.cut == "parts":
                    counters[tile] += 1
            if plan.cut == "parts":
                for tile in range(segments[-1][0], segments[0][0] + 1):
                    yield lambda tile=tile: counters[tile] >= parts
                    first, last = schedule.holders(tile, plan.programs, count, groups)
                    assert first <= program <= last
                    leave(tile, parts + last - first)

        def leave(at, last, counters=counters):
            counters[at] = 0 if counters[at] == last else counters[at] + 1

        found = programs_of(plan, count, groups, parts)
        running = [actions(p, s) for p, s in enumerate(found)]
        waiting = [next(r, None) for r in running]
        while any(w is not None for w in waiting):
            ready = [p for p, w in enumerate(waiting) if w is not None and w()]
            assert ready, "all wait"
            for p in ready:
                waiting[p] = next(running[p], None)
        assert not any(counters)
        assert plan.sums * hopper.BN * 64 * 4 <= split.WORKSPACE
        if plan.cut == "parts":
            holders = [schedule.holders(t, plan.programs, count, groups) for t in range(count)]
            for tile, (first, last) in enumerate(holders):
                having = [p for p, s in enumerate(found) if any(t == tile for t, *_ in s)]
                assert having == list(range(first, last + 1))


@pytest.mark.parametrize("count", COUNTS)
def test_programs_are_done_at_about_the_same_time(count):
    """The point of it: no program has more groups than the mean and what cuts move."""
    plan = hopper.share("tiles", count, 32, 2, 132, 128)
    work = [sum(s[2] - s[1] for s in p) for p in programs_of(plan, count, 32, 2)]
    assert max(work) <= count * 32 / plan.programs + 3
    plan = hopper.share("parts", count, 32, 2, 132, 64)
    if plan.cut == "parts":
        work = [sum(s[2] - s[1] for s in p) for p in programs_of(plan, count, 32, 2)]
        assert max(work) <= count * 32 / plan.programs + 3
