"""The 16-bit GEMM on a CUDA device: make the tile table, and race cuBLAS.

    python benchmarks/bench_linear.py tune --out tiles.json      # needs torch and triton
    python benchmarks/bench_linear.py compare --out result.json

Every time is the median of graph replays with weights rotated past the L2; a comparison times both
sides in one run.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import gemm_command
from benchmarks.timing import copies, copy_gb_per_s, graph_us, in_turn_us
from vllm_b70.ops import gemm as ops
from vllm_b70.ops import split
from vllm_b70.ops.tiles import Tile

SHAPES = [(248320, 4096), (12288, 4096), (4096, 4096)]
#: Further 16-bit weights of the two models and of their two-card shards, for the table.
MORE = [(124160, 4096), (248320, 5120), (6144, 4096), (4096, 2048), (4096, 8192), (5120, 10240),
        (64, 4096), (96, 5120), (32, 4096)]  # fmt: skip
ROWS = [1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096]


def partitions(columns: int) -> list[int]:
    """K partitions to try: the fewer columns, the more parts fill a device."""
    if columns >= 12000:
        return [1]
    return [1, 2] if columns > 5120 else [2, 3, 4] if columns > 1000 else [4, 8, 16]


def few(bm: int) -> list[Tile]:
    """Launches for row counts where the weight's bytes take the time."""
    shapes = [(16, 128, 2, 5), (16, 128, 2, 8), (32, 128, 4, 4), (32, 128, 2, 5), (32, 128, 4, 6),
              (64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 8, 5)]  # fmt: skip
    found = [
        Tile("split", bn, bm, warps, stages, bk)
        for bn, bk, warps, stages in shapes
        if bn > 16 or bm == 16
    ]
    for bn, bk, warps, stages in [(64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 8, 5)]:
        found.append(Tile("split", bn, bm, warps, stages, bk, swap=True))
        found.append(Tile("split", bn, bm, warps, stages, bk, swap=True, tensor=True))
    return found


def some(shapes: list[tuple[int, int, int, int]]) -> list[Tile]:
    """Parts side by side with large tiles; (bm, bn, warps, stages)."""
    return [
        Tile("split", bn, bm, warps, stages, 64, tensor=True) for bm, bn, warps, stages in shapes
    ]


def many(shapes: list[tuple[int, int, int, int, bool]]) -> list[Tile]:
    """Launches for many rows; (bm, bn, warps, stages, swap), with and without persistence."""
    found = []
    for bm, bn, warps, stages, swap in shapes:
        for persistent in (False, True):
            found.append(Tile("walk", bn, bm, warps, stages, 64, swap, True, persistent))
    return found


CANDIDATES: dict[int, list[Tile]] = {
    16: few(16),
    32: few(32),
    64: few(64) + some([(64, 64, 4, 6), (64, 128, 4, 5), (64, 128, 8, 6)])
    + many([(64, 64, 4, 6, False), (64, 128, 4, 4, True), (64, 128, 8, 5, True)]),
    128: some([(64, 64, 4, 6), (64, 128, 4, 5), (128, 64, 4, 5), (128, 128, 8, 5), (128, 128, 8, 6),
               (128, 128, 4, 5), (64, 256, 8, 5), (128, 256, 8, 4)])
    + many([(64, 64, 4, 5, False), (64, 128, 4, 5, False), (128, 64, 4, 5, False),
            (128, 64, 4, 5, True), (128, 128, 8, 6, False), (128, 128, 4, 6, False),
            (128, 256, 8, 4, False), (64, 256, 8, 5, False)]),
    256: some([(64, 128, 4, 5), (128, 64, 4, 5), (128, 128, 8, 5), (128, 128, 8, 6),
               (128, 128, 4, 5), (128, 256, 8, 4), (256, 128, 8, 4)])
    + many([(64, 128, 4, 5, False), (128, 64, 4, 5, False), (128, 128, 8, 5, False),
            (128, 128, 4, 5, False), (128, 256, 8, 4, False), (256, 128, 8, 4, False),
            (128, 256, 8, 3, False), (256, 128, 8, 3, False)]),
    512: some([(128, 128, 8, 5), (128, 256, 8, 4), (256, 128, 8, 4)])
    + many([(64, 128, 4, 4, False), (128, 128, 8, 4, False), (128, 128, 4, 4, False),
            (128, 256, 8, 3, False), (256, 128, 8, 3, False), (128, 256, 8, 4, False),
            (256, 128, 8, 4, False)]),
    1024: many([(128, 128, 8, 4, False), (128, 128, 8, 6, False), (128, 128, 4, 4, False),
                (128, 256, 8, 3, False), (256, 128, 8, 3, False), (128, 256, 8, 4, False)])
    + [Tile("walk", 128, 128, 8, 3, 128, False, True, p) for p in (False, True)],
    4096: many([(128, 128, 8, 4, False), (128, 128, 8, 6, False), (128, 256, 8, 3, False),
                (256, 128, 8, 3, False), (128, 256, 8, 4, False)])
    + [Tile("walk", 128, 128, 8, 3, 128, False, True, p) for p in (False, True)],
}  # fmt: skip


def weights(columns: int, depth: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Enough random weights to rotate past the L2."""
    number = copies(2 * columns * depth)
    return [torch.randn(columns, depth, device="cuda", dtype=dtype) for _ in range(number)]


def run(
    x: torch.Tensor, weight: torch.Tensor, done: torch.Tensor, parts: int, tile: Tile
) -> torch.Tensor:
    """One launch of a given tile."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    ops.launch(x, weight, None, done, out, parts, tile)
    return out


def fits(tile: Tile, rows: int, columns: int, parts: int) -> bool:
    """Whether a launch keeps to the workspace and the registers."""
    if tile.kernel == "split":
        return split.fits(parts, rows, columns)
    # A walk of several parts holds two accumulators.
    return parts == 1 or tile.bn * tile.bm <= 64 * 32 * tile.warps


def options(rows: int, columns: int, parts: int) -> list[Tile]:
    """The launches to try."""
    return [t for t in CANDIDATES[rows] if fits(t, rows, columns, parts)]


def _compile(launches: list[tuple[int, int, Tile]]) -> list[str]:
    """In a process of its own: fill Triton's cache; the shape of a weight does not matter to it."""
    weight = torch.zeros(4096, 4096, device="cuda", dtype=torch.float16)
    done = torch.zeros(ops.counters(4096), dtype=torch.int32, device="cuda")
    failed = []
    for rows, parts, tile in launches:
        x = torch.zeros(rows, 4096, device="cuda", dtype=torch.float16)
        try:
            run(x, weight, done, parts, tile)
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{rows} {parts} {tile}: {str(error)[:200]}")
    return failed


def compile_all(launches: list[tuple[int, int, Tile]]) -> None:
    """Compile launches in parallel, so that timing them afterwards finds them cached."""
    once = list({(parts, tile): (rows, parts, tile) for rows, parts, tile in launches}.values())
    with multiprocessing.get_context("spawn").Pool(15) as pool:
        for failed in pool.imap_unordered(_compile, [once[i::15] for i in range(15)]):
            for line in failed:
                print("cannot launch", line, flush=True)


def tune(shapes: list[tuple[int, int]], until: float) -> dict[str, Any]:
    """The table's entries for these shapes; stops at the time ``until``."""
    begin = time.time()
    compile_all(
        [(r, p, t) for n, _ in shapes for p in partitions(n) for r in CANDIDATES
         for t in options(r, n, p)]
    )  # fmt: skip
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    table: dict[str, Any] = {}
    for n, k in shapes:
        rotated = weights(n, k, torch.float16)
        done = torch.zeros(ops.counters(n), dtype=torch.int32, device="cuda")
        full = torch.randn(4096, k, device="cuda", dtype=torch.float16)
        reference = {
            parts: run(full[:1024], rotated[0], done, parts, Tile("walk", 64, 64, 4, 3, 64))
            for parts in partitions(n)
        }

        def measure(rows: int, parts: int, tile: Tile) -> float:
            x = full[:rows].contiguous()
            got = run(x, rotated[0], done, parts, tile)[:1024]
            differing = int((got != reference[parts][: got.shape[0]]).sum())
            if differing:
                print(f"DIFFERING {differing} {n}x{k} rows {rows} {parts} {tile}", flush=True)
                return float("inf")
            calls = [lambda w=w: run(x, w, done, parts, tile) for w in rotated]
            return graph_us(calls, 5, least=12 if n * rows < 2**22 else 2)

        def attempt(rows: int, parts: int, tile: Tile) -> float:
            try:
                # Up to 16 rows one tile serves all, and a single row is the common case.
                if rows == 16:
                    return (measure(1, parts, tile) + measure(16, parts, tile)) / 2
                return measure(rows, parts, tile)
            except Exception as error:
                print(f"failed {n}x{k} {rows} {parts} {tile}: {str(error)[:160]}", flush=True)
                return float("inf")

        best: dict[int, dict[int, tuple[float, Tile]]] = {}
        for parts in partitions(n):
            for rows in CANDIDATES:
                if time.time() > until:
                    break
                timed = [(attempt(rows, parts, t), t) for t in options(rows, n, parts)]
                best.setdefault(parts, {})[rows] = min(timed, key=lambda pair: pair[0])
                ranked = sorted(timed, key=lambda pair: pair[0])[:4]
                for us, t in ranked:
                    print(f"  {n}x{k} parts {parts} rows {rows}: {us:.1f} us {t}", flush=True)
        found = gemm_command.entry(best, list(CANDIDATES))
        if found is not None:
            table[f"{n}x{k}"] = found
            print(f"{n}x{k}: {found['parts']} parts", flush=True)
        rotated.clear()
        torch.cuda.empty_cache()
    return table


def compare(
    shapes: list[tuple[int, int]], dtypes: list[torch.dtype], until: float, save: Any
) -> None:
    """Time ours and cuBLAS, and the argmax against the weight's bytes; ``save`` gets the rows."""
    rows_out: list[dict[str, Any]] = []
    for dtype in dtypes:
        for n, k in shapes:
            if time.time() > until:
                print(f"not run for lack of time: {dtype} {n}x{k}", flush=True)
                continue
            rotated = weights(n, k, dtype)
            done = torch.zeros(ops.counters(n), dtype=torch.int32, device="cuda")
            full = torch.randn(max(ROWS), k, device="cuda", dtype=dtype)
            # The first thing timed would meet clocks that still rise: this also warms them.
            bandwidth = copy_gb_per_s()
            graph_us([lambda w=w: torch.nn.functional.linear(full[:256], w) for w in rotated])

            def row(op: str, rows: int, ours: float, peer: str, peer_us: float) -> None:
                rows_out.append(
                    {
                        "op": op,
                        "dtype": str(dtype).removeprefix("torch."),
                        "n": n,
                        "k": k,
                        "rows": rows,
                        "ours_us": round(ours, 2),
                        "peer": peer,
                        "peer_us": round(peer_us, 2),
                        "ratio": round(peer_us / ours, 3),
                        "gb_per_s": round(2 * n * k / ours / 1e3, 1),
                        "tflops": round(2 * rows * n * k / ours / 1e6, 2),
                    }
                )
                print(f"{op} {dtype} {n}x{k} rows {rows}: {ours:.1f} us; {peer} "
                      f"{peer_us / ours:.3f}", flush=True)  # fmt: skip

            for rows in ROWS:
                x = full[:rows].contiguous()
                least = 12 if n * rows < 2**22 else 2
                ours, peer = in_turn_us(
                    [lambda w=w: ops.gemm(x, w, None, done, 0) for w in rotated],
                    [lambda w=w: torch.nn.functional.linear(x, w) for w in rotated],
                    turns=5 if n * rows < 2**22 else 1, least=least,
                )  # fmt: skip
                row("linear", rows, ours, "cublas", peer)
                if n >= 100_000 and rows <= 256:
                    fused = graph_us([lambda w=w: ops.gemm_argmax(x, w, None, 0) for w in rotated])
                    plain = graph_us(
                        [
                            lambda w=w: torch.nn.functional.linear(x, w).argmax(dim=-1)
                            for w in rotated
                        ]
                    )
                    row("linear_argmax", rows, fused, "cublas+argmax", plain)
                    floor = 2 * n * k / bandwidth / 1e3
                    row("linear_argmax", rows, fused, "floor: weight bytes at copy bandwidth "
                        f"{bandwidth:.0f} GB/s", floor)  # fmt: skip
            save(rows_out)
            rotated.clear()
            torch.cuda.empty_cache()


def main() -> None:
    """Command line."""
    arguments = gemm_command.parser(__doc__.splitlines()[0]).parse_args()
    gemm_command.run(arguments, ops.OP, SHAPES, MORE, tune, compare)


if __name__ == "__main__":
    main()
