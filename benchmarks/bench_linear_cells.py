"""The 16-bit GEMM where it misses its targets: few launches, thought out for a shape, raced.

    python benchmarks/bench_linear_cells.py --out cells.json      # needs CUDA, torch and triton

The K partition of a weight serves all its row counts, so each is raced at all of them: a line a
partition says what would be met. Beside the best launch of a row count stand cuBLAS, timed next to
it, and the table's launch with and without overlap (programmatic dependent launch).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_linear import fits, run, weights
from benchmarks.timing import graph_us, head
from vllm_b70.ops import gemm as ops
from vllm_b70.ops import tiles
from vllm_b70.ops.tiles import Tile, replace

#: Row counts of the table, and those that are timed for each.
ROWS = {16: [1, 4, 16]} | {m: [m] for m in (32, 64, 128, 256, 512, 1024, 4096)}
DTYPE = torch.bfloat16
#: Shared memory that a program can have on a Hopper.
SHARED = 227 * 1024
#: A launch, and whether it overlaps the one before it.
Launch = tuple[int, Tile, bool]


def target(rows: int) -> float:
    """The least ratio to cuBLAS that is aimed at."""
    return 1.0 if rows <= 16 else 0.95 if rows <= 256 else 0.85


def split(*shapes: tuple[int, int, int, int, int], swap: bool = False) -> list[Tile]:
    """Parts side by side: (columns, rows, k, warps, stages), loaded by descriptors."""
    return [Tile("split", n, m, w, s, k, swap, True) for n, m, k, w, s in shapes]


def plain(*shapes: tuple[int, int, int, int, int]) -> list[Tile]:
    """As ``split``, loaded by pointers."""
    return [Tile("split", n, m, w, s, k) for n, m, k, w, s in shapes]


def walk(
    *shapes: tuple[int, int, int, int, int], kernel: str = "walk", swap: bool = False
) -> list[Tile]:
    """One program for all parts, with and without persistence."""
    return [
        Tile(kernel, n, m, w, s, k, swap, True, persistent)
        for n, m, k, w, s in shapes
        for persistent in (False, True)
    ]


def ahead(*found: Tile) -> list[Tile]:
    """Each launch with nothing, a little and much of its weight asked for before it waits."""
    return [replace(tile, ahead=values) for tile in found for values in (0, 512, 2048)]


def few(m: int) -> list[Tile]:
    """One tile of rows: the weight's bytes take the time."""
    found = split((64, m, 128, 4, 4), swap=True) + split((32, m, 128, 4, 6)) if m < 64 else []
    return ahead(*found, *plain((32, m, 128, 4, 4)))


#: By weight, K partition and row count. 132 multiprocessors; a program multiplies fastest with 128
#: or more rows of the operand that both warp groups read.
CELLS: dict[tuple[int, int], dict[int, dict[int, list[Tile]]]] = {
    (12288, 4096): {
        1: {
            16: few(16),
            32: few(32),
            64: ahead(*split((128, 64, 64, 8, 6), (128, 64, 64, 4, 6))),
            128: ahead(*walk((128, 128, 64, 4, 6)), *walk((64, 128, 64, 4, 6), kernel="wide")[:1],
                       *split((64, 128, 64, 4, 7), swap=True)),
            256: ahead(*walk((128, 128, 64, 8, 5), (128, 128, 64, 4, 5), kernel="wide")),
            512: ahead(*walk((128, 128, 64, 8, 5), (128, 256, 64, 8, 4), kernel="wide")[::2],
                       *walk((128, 128, 64, 4, 4))[1:]),
            1024: ahead(*walk((256, 128, 64, 8, 3))[1:]),
            4096: ahead(*walk((256, 128, 64, 8, 4))[1:]),
        }
    },
    (4096, 4096): {
        1: {
            16: few(16),
            32: few(32),
            64: ahead(*split((32, 64, 64, 4, 8), (32, 64, 128, 4, 6))),
            128: ahead(*split((32, 128, 64, 4, 8), (64, 64, 64, 4, 8)),
                       *split((64, 128, 64, 4, 6), swap=True)),
            256: ahead(*split((128, 64, 64, 4, 7), (64, 128, 64, 4, 7)),
                       *split((64, 128, 64, 4, 7), (64, 128, 128, 4, 4), swap=True)),
            512: ahead(*walk((128, 128, 64, 8, 6), (128, 128, 64, 4, 6))[1::2]),
            1024: ahead(*walk((256, 128, 64, 8, 4))[1:]),
            4096: ahead(*walk((256, 128, 64, 8, 4))[1:]),
        },
    },
}  # fmt: skip


def shared_bytes(tile: Tile) -> int:
    """Shared memory of a program: its operands in flight, and beside them the last tile's results
    where it goes on with the next."""
    columns = tile.bn * 3 // 2 if tile.kernel == "wide" else tile.bn
    return 2 * tile.stages * tile.bk * (columns + tile.bm) + 2**15 * tile.persistent


def launches(shape: tuple[int, int]) -> Iterator[tuple[int, int, Tile, bool]]:
    """Everything that is raced for a weight: K partition, row count, launch and overlap."""
    for parts, by_rows in CELLS[shape].items():
        for rows, candidates in by_rows.items():
            for tile in candidates:
                if fits(tile, rows, shape[0], parts) and shared_bytes(tile) < SHARED:
                    yield parts, rows, tile, True
    plan = tiles.plan(ops.OP, "cuda-sm90", *shape, shape[1] // ops.UNIT)
    for rows in ROWS:
        for overlap in (False, True):
            yield plan.parts, rows, plan.tile(rows), overlap


def _compile(jobs: list[Launch]) -> list[str]:
    """In a process of its own: fill Triton's cache."""
    weight = torch.zeros(4096, 4096, device="cuda", dtype=DTYPE)
    done = torch.zeros(ops.counters(4096), dtype=torch.int32, device="cuda")
    failed = []
    for parts, tile, overlap in jobs:
        tile = replace(tile, overlap=overlap)
        try:
            run(weight[: tile.bm].contiguous(), weight, done, parts, tile)
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{parts} {tile}: {str(error)[:200]}")
    return failed


def compile_all(jobs: list[Launch], workers: int) -> None:
    """Compile in parallel, so that timing finds every kernel in Triton's cache."""
    began = time.time()
    # The long ones, which have the most values in a tile, first and far apart.
    jobs = sorted(set(jobs), key=lambda job: -job[1].bn * job[1].bm * job[1].bk)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for failed in pool.imap_unordered(_compile, [jobs[i::workers] for i in range(workers)]):
            for line in failed:
                print("cannot launch", line, flush=True)
    print(f"compiled {len(jobs)} launches in {time.time() - began:.0f} s", flush=True)


class Race:
    """Times of one weight."""

    def __init__(self, shape: tuple[int, int]):
        self.shape = shape
        self.weights = weights(*shape, DTYPE)
        self.done = torch.zeros(ops.counters(shape[0]), dtype=torch.int32, device="cuda")
        self.x = torch.randn(max(ROWS), shape[1], device="cuda", dtype=DTYPE)
        self.want: dict[int, torch.Tensor] = {}
        #: The first thing timed would meet clocks that still rise.
        for _ in range(3):
            self.cublas(256)

    def cublas(self, rows: int, replays: int = 15) -> float:
        """Microseconds of cuBLAS."""
        x = self.x[:rows].contiguous()
        return graph_us(
            [lambda w=w: torch.nn.functional.linear(x, w) for w in self.weights], replays
        )

    def ours(self, rows: int, parts: int, tile: Tile, overlap: bool, replays: int = 5) -> float:
        """Microseconds of a launch; infinity if its bits differ from those of another kernel."""
        if parts not in self.want:
            reference = Tile("walk", 64, 64, 4, 3, 64)
            self.want[parts] = run(self.x[:1024], self.weights[0], self.done, parts, reference)
        tile = replace(tile, overlap=overlap)
        x = self.x[:rows].contiguous()
        got = run(x, self.weights[0], self.done, parts, tile)[:1024]
        if differing := int((got != self.want[parts][: len(got)]).sum()):
            print(f"DIFFERING {differing} {self.shape} rows {rows} {parts} {tile}", flush=True)
            return math.inf
        calls = [lambda w=w: run(x, w, self.done, parts, tile) for w in self.weights]
        return graph_us(calls, replays)


def short(tile: Tile) -> str:
    """A tile in a few letters."""
    flags = [f for f in ("swap", "tensor", "persistent", "ahead") if getattr(tile, f)]
    words = (tile.kernel, f"{tile.bn}x{tile.bm}x{tile.bk}", f"{tile.warps}w", f"{tile.stages}s")
    return " ".join([*words, *(f"{f}={getattr(tile, f)}"[:12] for f in flags)])


def race(shape: tuple[int, int], until: float, result: dict[str, Any]) -> None:
    """Race one weight's launches, and print and keep what each K partition gives."""
    name = f"{shape[0]}x{shape[1]}"
    data = Race(shape)
    all_launches = list(launches(shape))
    table = tiles.plan(ops.OP, "cuda-sm90", *shape, shape[1] // ops.UNIT)
    chosen: dict[int, list[dict[str, Any]]] = {}
    ratios: dict[int, dict[int, float]] = {}
    both: dict[int, dict[int, list[float]]] = {}
    times: dict[int, dict[int, list[str]]] = {}
    for rows, counts in ROWS.items():
        peer = {count: data.cublas(count) for count in counts}
        for overlap in (False, True):
            line = [
                f"{peer[c] / data.ours(c, table.parts, table.tile(rows), overlap, 15):.3f}"
                for c in counts
            ]
            word = "on" if overlap else "off"
            print(f"{name} rows {counts} table, overlap {word}: {' '.join(line)}", flush=True)
        for parts in CELLS[shape]:
            if time.time() > until:
                print(f"not run for lack of time: {name} rows {rows} parts {parts}", flush=True)
                continue
            timed = []
            for p, m, tile, overlap in all_launches:
                if (p, m, overlap) != (parts, rows, True):
                    continue
                try:
                    us = sum(data.ours(c, p, tile, True) for c in counts) / len(counts)
                except Exception as error:
                    print(f"failed {name} {rows} {p} {tile}: {str(error)[:160]}", flush=True)
                    continue
                timed.append((us, short(tile), tile))
            timed.sort(key=lambda t: t[:2])
            times.setdefault(parts, {})[rows] = [f"{us:.2f} us {words}" for us, words, _ in timed]
            # The first two again, longer, and next to cuBLAS.
            again = []
            for _, words, tile in timed[:2]:
                pairs = [(data.ours(c, parts, tile, True, 15), data.cublas(c)) for c in counts]
                again.append((sum(us for us, _ in pairs), words, pairs, tile))
            if not again:
                continue
            _, words, pairs, tile = min(again, key=lambda t: t[:2])
            for count, (us, theirs) in zip(counts, pairs, strict=True):
                ratios.setdefault(parts, {})[count] = round(theirs / us, 3)
                both.setdefault(parts, {})[count] = [round(us, 2), round(theirs, 2)]
            line = " ".join(f"{us:.2f} us {theirs / us:.3f}" for us, theirs in pairs)
            print(f"{name} parts {parts} rows {counts}: {line} {words}; first raced: "
                  f"{' | '.join(times[parts][rows][:3])}", flush=True)  # fmt: skip
            # What a tile of the table leaves out is what its fields are without it.
            plain_tile = vars(Tile("", 0, 0, 0, 0))
            kept = {k: v for k, v in vars(tile).items() if v != plain_tile[k]} | {"overlap": True}
            chosen.setdefault(parts, []).append({"rows": rows} | kept)
    result[name] = {}
    for parts, found in ratios.items():
        missed = [m for m, ratio in found.items() if ratio < target(m)]
        line = " ".join(f"{m}:{ratio}" for m, ratio in found.items())
        print(f"== {name} parts {parts}: {line} missed {missed}", flush=True)
        result[name][parts] = {
            "ratios": found, "missed": missed, "us": both[parts], "times": times[parts],
            "tiles": [json.dumps(tile) for tile in chosen[parts]],
        }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", help="for example 4096x4096; default: all")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=95.0, help="stop starting new work then")
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    torch.manual_seed(0)
    shapes = list(CELLS)
    if arguments.shapes:
        shapes = [tuple(map(int, s.split("x"))) for s in arguments.shapes.split(",")]  # type: ignore[misc]
    jobs = [(p, tile, overlap) for s in shapes for p, _, tile, overlap in launches(s)]
    jobs += [(p, Tile("walk", 64, 64, 4, 3, 64), False) for s in shapes for p in CELLS[s]]
    compile_all(jobs, arguments.workers)
    result: dict[str, Any] = head()
    for shape in shapes:
        race(shape, until, result)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
