"""The judge of row invariance (C1): row r of an op is a function of input row r alone.

The results of the largest call are the measure; every other call must give the same bits for the
same rows, wherever they stand and whatever else is in the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from vllm_b70.census.memory import MOST
from vllm_b70.census.verdict import SEEDS, Tally, Verdict

#: Row counts that are always tried: all up to here. A verification of 16 drafts has 17 rows.
ALWAYS = 17
#: Row counts that are tried if the op is not too large: all up to here, and above that one in each
#: run of so many.
DENSE, STRIDE = 32, 16
#: Rows that are compared at each row count, of all inputs together, so that calls of few rows show
#: what a rounding hides in most of them.
COMPARED = 32
#: Multiplications that one input of an op may cost, and what a call costs however small it is;
#: larger ops are tried at fewer row counts.
WORK, CALL = {"cpu": 2**28}, {"cpu": 2**22}
WORK_GPU, CALL_GPU = 2**43, 2**35

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RowProbe:
    """An op that works row by row.

    Attributes:
        op, shape: As in ``Probe``.
        rows: The most rows that the server may hand to it.
        cost: Multiplications a row.
        width: Bytes of a row of the inputs or the results, whichever is more.
        device: Where it runs.
        inputs: Makes random inputs from a row count and a seed; rows are the first dimension.
        run: Calls the installed implementation; its results have the rows first too.
        special: Row counts to try besides, e.g. those of captured graphs.
        memory: Bytes that the inputs of a call, or its results, may have; see ``census.memory``.
        launches: Row counts that stand for all launches of its kernels.
        together: Whether a call waits for all ranks to make it.
    """

    op: str
    shape: str
    rows: int
    cost: int
    width: int
    device: torch.device
    inputs: Callable[[int, int], Tensors]
    run: Callable[..., Tensors]
    special: tuple[int, ...] = ()
    memory: int = MOST
    launches: tuple[int, ...] = ()
    together: bool = False

    @property
    def least_memory(self) -> int:
        """What ``memory`` must be for the row counts that are always tried."""
        return min(self.rows, ALWAYS) * self.width

    @property
    def most_rows(self) -> int:
        """The most rows that the server may hand to it and that there is memory for."""
        return min(self.rows, max(ALWAYS, self.memory // self.width))

    def judge(self) -> Verdict:
        """As ``judge_rows``."""
        return judge_rows(self)


def row_counts(
    most: int, special: Iterable[int], budget: float, cost: float = 1, call: float = 0
) -> list[int]:
    """The row counts to try, ascending.

    Args:
        most: The largest that the server may need.
        special: Counts that come before the sampled ones.
        budget: What all of them may cost together; up to ``ALWAYS`` they are free.
        cost: Of a row.
        call: Of a call, however few rows it has.
    """
    powers = [2**k + d for k in range(5, most.bit_length() + 1) for d in (0, 1, -1)]
    wanted = [*range(1, DENSE + 1), most, *powers, *special, *range(STRIDE - 5, most, STRIDE)]
    chosen = set(range(1, min(most, ALWAYS) + 1))
    for count in wanted:
        price = count * cost + call
        if 0 < count <= most and count not in chosen and price <= budget:
            chosen.add(count)
            budget -= price
    return sorted(chosen)


def judge_rows(probe: RowProbe) -> Verdict:
    """Compare the op with itself over row counts, places, orders and neighbours."""
    tally = Tally(probe.device)
    kind = probe.device.type
    counts = row_counts(
        probe.most_rows,
        probe.special,
        WORK.get(kind, WORK_GPU),
        probe.cost,
        CALL.get(kind, CALL_GPU),
    )
    most = counts[-1]
    for seed in SEEDS:
        x = probe.inputs(most, seed)
        whole = probe.run(*_rows(x, slice(None)))
        tally.calls += 1
        tally.measure(whole, most)
        for i, count in enumerate(counts):
            for j in range(-(-min(COMPARED // len(SEEDS) + 1, most) // count)):
                # One after the other from the start, and all over the place.
                first = min(j * count, most - count)
                if seed != SEEDS[0]:
                    first = (most - count) * ((7 * i + 5 * j) % 32) // 31
                where = slice(first, first + count)
                got = probe.run(*_rows(x, where))
                tally.compare(got, _rows(whole, where), "{} rows", count)
        generator = torch.Generator().manual_seed(seed)
        for count in sorted({most, counts[len(counts) // 2], counts[-len(counts) // 4]}):
            order = torch.randperm(most, generator=generator)[:count].to(probe.device)
            got = probe.run(*_rows(x, order))
            tally.compare(got, _rows(whole, order), "in another order, of {} rows", count)
            # The first rows are a step's, the others pad its graph with whatever was there.
            kept = torch.arange(count, device=probe.device) < -(-count // 3)
            got = probe.run(*_poisoned(_rows(x, slice(count)), kept))
            want = _rows(_rows(whole, slice(count)), kept)
            tally.compare(_rows(got, kept), want, "beside NaN padding, of {} rows", count)
            kept = (torch.rand(count, generator=generator) < 0.5).to(probe.device)
            got = probe.run(*_poisoned(_rows(x, slice(count)), kept))
            want = _rows(_rows(whole, slice(count)), kept)
            tally.compare(_rows(got, kept), want, "among NaN and infinities, of {} rows", count)
    return tally.verdict(probe.op, probe.shape)


def _rows(tensors: Tensors, where: slice | torch.Tensor) -> Tensors:
    """Some rows of each tensor, in memory of their own: ops may write to their inputs."""
    return tuple(t[where].clone() for t in tensors)


def _poisoned(tensors: Tensors, kept: torch.Tensor) -> Tensors:
    """Every row that is not kept holds NaN or infinity, in turn."""
    odd = torch.arange(len(kept), device=kept.device) % 2 == 0
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor[~kept & odd] = float("nan")
            tensor[~kept & ~odd] = float("inf")
    return tensors
