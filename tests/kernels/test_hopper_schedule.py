"""Who computes what in the Hopper kernel, for every program of many launches: no GPU is needed."""

import itertools

import pytest

from vllm_b70.kernels import hopper_schedule as schedule
from vllm_b70.ops import hopper, split

SHAPES = [(32, 2), (96, 8), (32, 3), (32, 4), (40, 3), (136, 8), (31, 3), (24, 8), (3, 1), (7, 2)]
COUNTS = [*range(1, 30), 40, 64, 80, 127, 128, 131, 132, 133, 160, 192, 263, 264, 265, 544, 1000]


def programs_of(plan, count, groups, parts):
    """The segments of each program, in its order, as the kernel finds them."""
    pieces = parts if plan.side else 1
    shared = count - plan.strided
    found = []
    for program in range(plan.programs):
        start, stop = (
            schedule.cut(p, plan.programs, shared, groups, pieces) for p in (program, program + 1)
        )
        whole = (plan.strided - program + plan.programs - 1) // plan.programs
        last_piece = schedule.piece_at(max(stop - 1, 0), groups, pieces)
        segments = whole
        if stop > start:
            segments += last_piece - schedule.piece_at(start, groups, pieces) + 1
        found.append(
            [
                schedule.segment(
                    i, whole, program, plan.programs, plan.strided, last_piece, start, stop, groups,
                    pieces,
                )
                for i in range(segments)
            ]
        )  # fmt: skip
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
        pieces = parts if plan.side else 1
        done = {}
        found = programs_of(plan, count, groups, parts)
        for program, segments in enumerate(found):
            assert segments, "the kernel loads the words of the first one"
            shared = [s for s in segments if s[0] >= plan.strided]
            assert segments[len(segments) - len(shared) :] == shared
            for i, (tile, first, last, low, high) in enumerate(segments):
                assert 0 <= low <= first and first + 2 <= last <= high <= groups
                part = schedule.piece_at(low, groups, pieces)
                borders = [p * groups // pieces for p in (part, part + 1)]
                assert [low, high] == borders
                if last < high:
                    assert (tile, first, last, low, high) == shared[0] and first == low
                    following = found[program + 1][-1]
                    assert following[:2] == (tile, last) and following[2:] == (high, low, high)
                if first > low:
                    assert i == len(segments) - 1 and last == high
                    assert found[program - 1][len(found[program - 1]) - len(shared_of(
                        found[program - 1], plan.strided))][:3] == (tile, low, first)  # fmt: skip
                done.setdefault(tile, []).append((first, last))
        assert sorted(done) == list(range(count))
        for ranges in done.values():
            ranges.sort()
            assert ranges[0][0] == 0 and ranges[-1][1] == groups
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


def shared_of(segments, strided):
    return [s for s in segments if s[0] >= strided]


@pytest.mark.parametrize(("shape", "cut", "processors"), CASES, ids=str)
def test_no_program_waits_for_ever(shape, cut, processors):
    """All programs run at once, each to where it has to wait; until all are done. Counters are zero
    again, and no more of them and of the workspace are used than the launch provides."""
    groups, parts = shape
    for count in COUNTS:
        plan = hopper.share(cut, count, groups, parts, processors, 64)
        counters = [0] * (plan.counters // 2)

        def actions(program, segments, plan=plan, counters=counters, count=count):
            """What the kernel does with the counters; what it yields must become true first."""
            shared = shared_of(segments, plan.strided)
            for tile, first, last, low, high in segments:
                if first > low:
                    yield lambda: counters[program - 1] >= 1
                    leave(program - 1, 1)
                if last < high:
                    counters[program] += 1
                elif plan.side:
                    counters[plan.programs + tile] += 1
            if plan.side:
                for tile in range(shared[-1][0], shared[0][0] + 1):
                    at = plan.programs + tile
                    yield lambda at=at: counters[at] >= parts
                    first, last = schedule.holders(tile, plan.programs, count, groups)
                    assert first <= program <= last
                    leave(at, parts + last - first)

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
        if plan.side:
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
    if plan.side:
        work = [sum(s[2] - s[1] for s in p) for p in programs_of(plan, count, 32, 2)]
        assert max(work) <= count * 32 / plan.programs + 3
