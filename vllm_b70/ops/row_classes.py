"""Row classes of a vendor's GEMM: row counts among which a row's result never changes by a bit.

A vendor picks tiles, and with them the order of additions, by the number of rows. Counts that end
in one order form a class. A weight whose calls are all padded or split to members of one class is
row-invariant though its kernel is not. Here classes are found by asking a GEMM, certified, chosen,
and calls are planned. Nothing here knows what the GEMM is.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

#: [M, K] to [M, N]; the rows are in memory of their own.
Gemm = Callable[[torch.Tensor], torch.Tensor]

#: Inputs that are compared, by the seeds they are drawn with. One row of one input merged classes
#: that were not one.
SEEDS = (291, 292, 293)
#: Rows and values that are compared at the least for each input, as a rounding to 16 bits hides
#: most differences; and rows at the most. Small counts compute them in several calls.
LEAST_ROWS, VALUES, MOST_ROWS = 32, 2**15, 256
#: Counts that are always asked.
ALWAYS = 17
#: Every count is asked up to here, if that is cheap.
DENSE = 320
#: A class must reach so many rows to be preferred: in smaller pieces a prompt reads the weight too
#: often. Without one that does, any class will do.
REACH = 128
#: Bytes from which on a weight takes the most populous class and not the one that begins first:
#: there, reading the weight outweighs the rows that pad a small call.
LARGE = 256 * 2**20
#: What is left of a class whose larger members are not certified must reach so many rows.
LEAST_PIECE = 8
#: Calls with the same input.
REPEATS = 8
UNSTEADY = "it is not deterministic"


@dataclass(frozen=True)
class RowClass:
    """Row counts that gave the same bits for the same rows.

    Attributes:
        members: Ascending.
    """

    members: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """How the calls on one weight are made.

    Attributes:
        members: The only row counts that are called, ascending; empty if none may be.
        why: What led to it, in words.
    """

    members: tuple[int, ...]
    why: str

    def pieces(self, rows: int) -> tuple[tuple[int, int], ...]:
        """As the function of that name."""
        return pieces(self.members, rows)


def pieces(members: tuple[int, ...], rows: int) -> tuple[tuple[int, int], ...]:
    """Cut a call into calls of members: no more of them than needed, and no more padding than that
    needs where all but the last two are of the largest member.

    Args:
        members: Ascending, not empty.
        rows: Of the call.

    Returns:
        (rows, called) in the order of the rows: so many of them, padded to so many.
    """

    def at_least(count: int) -> int:
        return members[bisect.bisect_left(members, count)]

    if rows == 0:
        return ()
    largest = members[-1]
    if rows <= largest:
        return ((rows, at_least(rows)),)
    whole = -(-rows // largest) - 2
    rest = rows - whole * largest
    pairs = (
        (first + at_least(rest - first), -first) for first in members if rest - first <= largest
    )
    first = -min(pairs)[1]
    return (*[(largest, largest)] * whole, (first, first), (rest - first, at_least(rest - first)))


def spans(members: Sequence[int]) -> tuple[int, ...]:
    """Ascending integers as first, last and step of each run, one after the other."""
    runs: list[list[int]] = []
    for member in members:
        if runs and (runs[-1][0] == runs[-1][1] or member - runs[-1][1] == runs[-1][2]):
            runs[-1][1:] = [member, member - runs[-1][1]]
        else:
            runs.append([member, member, 1])
    return tuple(number for run in runs for number in run)


def members_of(flat: tuple[int, ...]) -> tuple[int, ...]:
    """Inverse of ``spans``."""
    runs = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    return tuple(member for first, last, step in runs for member in range(first, last + 1, step))


def row_counts(most: int, work: float, cost: float, call: float) -> tuple[int, ...]:
    """The row counts to ask, ascending: all of them if that is cheap, else the small ones and 16 in
    each doubling, so that padding stays below a sixteenth.

    Args:
        most: The largest.
        work: What all of them may cost together; up to ``ALWAYS`` they are free.
        cost: Of a row.
        call: Of a call, however few rows it has.
    """
    powers = [1 << bit for bit in range(most.bit_length())]
    sampled = [n for n in range(1, most + 1) if n % (1 << max(0, n.bit_length() - 5)) == 0]
    chosen = set(range(1, min(most, ALWAYS) + 1))
    for count in [most, *powers, *sampled, *range(1, min(most, DENSE) + 1)]:
        price = count * cost + call
        if count not in chosen and price <= work:
            chosen.add(count)
            work -= price
    return tuple(sorted(chosen))


def compared(columns: int) -> int:
    """Rows of each input that are compared at every count, for a weight of so many columns."""
    return min(MOST_ROWS, max(LEAST_ROWS, VALUES // columns))


def inputs(rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """An input for each of ``SEEDS``, [rows, depth]: normal, with a few large values, small."""
    found = []
    for i, seed in enumerate(SEEDS):
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(rows, depth, generator=generator, device=device, dtype=torch.float32)
        if i == 1:
            large = torch.rand(rows, depth, generator=generator, device=device) < 2e-3
            x = torch.where(large, 100 * x, x)
        elif i == 2:
            x = x / 10
        found.append(x.to(dtype))
    return found


@functools.lru_cache(maxsize=2)
def _odd(words: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(SEEDS[0])
    return torch.randint(-(2**62), 2**62, (words,), generator=generator, device=device) * 2 + 1


def fingerprints(y: torch.Tensor) -> torch.Tensor:
    """A number for each row, [M] int64, that any change of any bit of the row changes: a sum of its
    words, each times an odd number of its own, modulo 2**64."""
    y = y.contiguous()
    size = y.element_size()
    if y.shape[1] * size % 8 == 0 and y.data_ptr() % 8 == 0:
        words = y.view(torch.int64)
    else:
        words = y.view({2: torch.int16, 4: torch.int32}[size]).long()
    return (words * _odd(words.shape[1], words.device)).sum(-1)


def find(gemm: Gemm, bases: Sequence[torch.Tensor], counts: Sequence[int]) -> list[RowClass]:
    """Group row counts by what they give for the same rows, on all inputs.

    Args:
        gemm: Asked at every count.
        bases: Inputs of the same shape, from ``inputs``; what they have more than the largest count
            is compared at every count.
        counts: Ascending.

    Returns:
        Classes whose members together are ``counts``, in the order of their first members.

    Raises:
        ValueError: A result is not finite, or rows that differ give one result: it says nothing.
    """
    rows = len(bases[0]) - max(counts)
    found: list[torch.Tensor] = []
    sound: list[torch.Tensor] = []
    for x in bases:
        for count in counts:
            for j in range(-(-rows // count)):
                y = gemm(x[j * count : (j + 1) * count].clone())
                if count in (counts[0], counts[-1]):
                    sound.append(y.isfinite().all())
                found.append(fingerprints(y))
    if not torch.stack(sound).all():
        raise ValueError("its results are not finite")
    # The device is waited for once.
    numbers = iter(torch.cat(found).cpu().split([len(f) for f in found]))
    prints: dict[int, list[torch.Tensor]] = {count: [] for count in counts}
    for _ in bases:
        for count in counts:
            prints[count].append(torch.cat([next(numbers) for _ in range(-(-rows // count))]))
    if any(len(p[:rows].unique()) < rows for p in prints[counts[-1]]):
        raise ValueError("rows that differ give one result")

    def same(one: int, other: int) -> bool:
        return all(
            torch.equal(p[: len(q)], q[: len(p)])
            for p, q in zip(prints[one], prints[other], strict=True)
        )

    classes: list[list[int]] = []
    for count in counts:
        for members in classes:
            # Whatever agrees with the member of the most rows agrees with all of them.
            if same(count, max(members, key=lambda member: len(prints[member][0]))):
                members.append(count)
                break
        else:
            classes.append([count])
    return [RowClass(tuple(members)) for members in classes]


def _patterns(count: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Orders in which the rows of a call may stand: indices of rows, [count]."""
    order = torch.arange(count, device=device)
    generator = torch.Generator().manual_seed(count)
    return {
        "moved by one": order.roll(1),
        "moved by half": order.roll(count // 2),
        "turned round": order.flip(0),
        "shuffled": torch.randperm(count, generator=generator).to(device),
        "one row at every place": torch.zeros_like(order),
    }


def _fillings(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What may stand in rows that nobody asked for, [M, K] each."""
    odd = torch.arange(len(x), device=x.device)[:, None] % 2 == 0
    infinite = torch.where(odd, torch.inf, torch.nan).to(x.dtype).expand_as(x)
    return {
        "zeros": torch.zeros_like(x),
        "NaN": torch.full_like(x, torch.nan),
        "infinities": infinite,
        "large values": x.flip(0, 1) * 1000,
    }


def certify(gemm: Gemm, bases: Sequence[torch.Tensor], count: int) -> str:
    """Whether a call of so many rows depends on nothing but each row.

    Args:
        gemm, bases: As in ``find``.
        count: The row count.

    Returns:
        Why not, in words; empty if nothing was found.
    """
    bad: list[torch.Tensor] = []
    labels: list[str] = []

    def compare(label: str, x: torch.Tensor, want: torch.Tensor, kept: torch.Tensor) -> None:
        bad.append((fingerprints(gemm(x))[kept] != want).any())
        labels.append(label)

    for base in bases:
        x = base[:count].clone()
        want = fingerprints(gemm(x))
        every = torch.arange(count, device=x.device)
        for _ in range(REPEATS):
            compare(UNSTEADY, x, want, every)
        for name, order in _patterns(count, x.device).items():
            compare(f"a row's place shows ({name})", x[order], want[order], every)
        keeps = [every[:k] for k in sorted({1, -(-count // 3), count - 1}) if 0 < k < count]
        scattered = [every[::2], every[1::2]] if count > 1 else []
        for kept in [*keeps, *scattered]:
            for name, filling in _fillings(x).items():
                filled = filling.clone()
                filled[kept] = x[kept]
                compare(f"other rows show ({name})", filled, want[kept], kept)
    wrong = [label for label, w in zip(labels, torch.stack(bad).tolist(), strict=True) if w]
    # What is not deterministic differs in the other checks too.
    return min(wrong, key=lambda label: label != UNSTEADY, default="")


def refusal(gemm: Gemm, bases: Sequence[torch.Tensor], members: Sequence[int]) -> str:
    """Why a class may not be used; empty if its first, middle and last member are certified."""
    for count in sorted({members[0], members[len(members) // 2], members[-1]}):
        why = certify(gemm, bases, count)
        if why:
            return f"{why} at {count} rows"
    return ""


def preference(classes: Iterable[RowClass], most: int, nbytes: int) -> list[RowClass]:
    """Classes in the order in which they are wanted.

    Args:
        classes: From ``find``.
        most: The largest row count that the server needs.
        nbytes: Of the weight.
    """

    def rank(c: RowClass) -> tuple[bool, int, int]:
        short = c.members[-1] < min(REACH, most)
        first, populous = c.members[0], -len(c.members)
        return (short, populous, first) if nbytes >= LARGE else (short, first, populous)

    return sorted(classes, key=rank)


def make_plan(
    gemm: Gemm, bases: Sequence[torch.Tensor], counts: Sequence[int], nbytes: int
) -> Plan:
    """Find the classes of a GEMM and take the one that is wanted most of those that are certified.

    Args:
        gemm, bases, counts: As in ``find``.
        nbytes: Of the weight.
    """
    try:
        wanted = preference(find(gemm, bases, counts), counts[-1], nbytes)
    except ValueError as error:
        return Plan((), str(error))
    refusals: list[str] = []
    for one in wanted:
        why = refusal(gemm, bases, one.members)
        if not why:
            others = f", {len(refusals)} refused first: {refusals[0]}" if refusals else ""
            return Plan(one.members, f"one of {len(wanted)} classes{others}")
        refusals.append(why)
    for one in wanted:
        members = one.members[: len(one.members) // 2]
        while members and members[-1] >= LEAST_PIECE:
            if not refusal(gemm, bases, members):
                return Plan(members, f"pieces, as no whole class is certified: {refusals[0]}")
            members = members[: len(members) // 2]
    return Plan((), f"no class of {len(wanted)} is certified: {refusals[0]}")
