"""Drafting on a CUDA device: make the argmax's tile table, and time what each switch saves.

    python benchmarks/bench_draft.py tune --out tiles.json
    python benchmarks/bench_draft.py compare --out draft.json --tiles tiles.json

``compare`` times the 4-bit head with its argmax against the time that its bytes need at the
bandwidth of a copy; the linears and the head of one draft pass of the 9B, switch by switch; and how
long the head takes to make, in how much memory. Medians of graph replays; what is timed is larger
than the L2.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import gemm_command
from benchmarks.bench_int4_linear import weight
from benchmarks.timing import copies, copy_gb_per_s, graph_us
from vllm_b70.ops import gemm, int4_argmax, int4_gemm
from vllm_b70.ops.int4_quantise import quantise_words
from vllm_b70.ops.int4_words import Int4Words
from vllm_b70.ops.tiles import Tile

#: The whole vocabulary, and a shortlist.
SHAPES = [(248320, 4096), (65536, 4096)]
MORE = [(248320, 5120), (65536, 5120)]
ROWS = [1, 4, 8, 16, 32, 64]
GROUP = 128
#: What tiles are timed in: the model's.
DTYPE = torch.bfloat16
#: Rows of a tile's bound, and what is tried there: (bn, bm, warps, stages, ahead).
CANDIDATES: dict[int, list[tuple[int, int, int, int, int]]] = {
    bound: [
        (128, 16, 4, 3, 0), (128, 16, 4, 4, 0), (128, 16, 4, 4, 512), (128, 16, 4, 5, 0),
        (64, 16, 4, 4, 0), (64, 16, 4, 6, 512), (256, 16, 8, 3, 0), (256, 16, 8, 4, 0),
        (256, 16, 8, 4, 512), (256, 16, 4, 4, 0), (256, 16, 4, 5, 512), (128, 16, 8, 5, 0),
    ] for bound in (8, 16)
} | {
    32: [
        (128, 32, 4, 3, 0), (128, 32, 4, 4, 0), (128, 32, 4, 3, 512), (128, 32, 8, 4, 0),
        (256, 32, 8, 3, 0), (256, 32, 8, 4, 0), (256, 32, 8, 4, 512), (64, 32, 4, 4, 0),
        (256, 32, 16, 4, 0), (128, 16, 4, 4, 0), (256, 16, 8, 4, 0),
    ],
    64: [
        (64, 64, 4, 3, 0), (128, 64, 8, 3, 0), (128, 64, 8, 4, 0), (256, 64, 8, 3, 0),
        (256, 64, 8, 4, 0), (256, 64, 8, 4, 512), (128, 64, 4, 3, 0), (256, 32, 8, 4, 0),
        (128, 32, 4, 4, 0),
    ],
}  # fmt: skip
#: Linears of the 9B's MTP layer, columns by depth.
LAYER = [(4096, 8192), (10240, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]


def tile_of(candidate: tuple[int, int, int, int, int]) -> Tile:
    """The launch that a candidate stands for."""
    return Tile("walk", *candidate[:4], ahead=candidate[4])


def run(x: torch.Tensor, w: Int4Words, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch of a given tile."""
    value = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    index = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    int4_argmax.launch(x, w, value, index, int4_argmax.parts_of(w), tile, ptx=True)
    return value, index


def best(x: torch.Tensor, w: Int4Words) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on a packed weight."""
    return int4_argmax.int4_argmax(x, w.words, w.scale, w.columns, w.group)


def _compile(tiles: list[Tile]) -> list[str]:
    """In a process of its own: fill Triton's cache; N and K do not matter to it."""
    w, failed = weight(65536, 4096, DTYPE, 0), []
    for tile in tiles:
        try:
            run(torch.zeros(1, 4096, device="cuda", dtype=DTYPE), w, tile)
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{tile}: {str(error)[:200]}")
    return failed


def tune(shapes: list[tuple[int, int]], until: float) -> dict[str, Any]:
    """The table's entries for these shapes; stops at the time ``until``."""
    every = sorted({c for found in CANDIDATES.values() for c in found})
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        jobs = [[tile_of(c) for c in every[i::14]] for i in range(14)]
        for failed in pool.imap_unordered(_compile, jobs):
            for line in failed:
                print("cannot launch", line, flush=True)
    table: dict[str, Any] = {}
    for n, k in shapes:
        weights = [weight(n, k, DTYPE, i) for i in range(copies(n * k // 2))]
        full = torch.randn(max(ROWS), k, device="cuda", dtype=DTYPE)
        # All tiles must give the bits of this one, which are near those of a row of logits.
        want = run(full, weights[0], tile_of(CANDIDATES[64][0]))
        done = torch.zeros(int4_gemm.counters(n), dtype=torch.int32, device="cuda")
        logits = int4_gemm.apply(full, weights[0], None, done, 0).float()
        chosen_logit = logits.gather(1, want[1][:, None])[:, 0]
        spacing = torch.finfo(DTYPE).eps * logits.amax(1).abs()
        if not (chosen_logit >= logits.amax(1) - 2 * spacing).all():
            print(f"WRONG {n}x{k}: a draft's logit is far from the best", flush=True)
            continue

        def measure(rows: int, tile: Tile) -> float:
            x = full[:rows].contiguous()
            try:
                value, index = run(x, weights[0], tile)
                differing = int(((value != want[0][:rows]) | (index != want[1][:rows])).sum())
                if differing:
                    print(f"DIFFERING {differing} {n}x{k} rows {rows} {tile}", flush=True)
                    return float("inf")
                return graph_us([lambda w=w: run(x, w, tile) for w in weights], 7)
            except Exception as error:
                print(f"failed {n}x{k} {rows} {tile}: {str(error)[:160]}", flush=True)
                return float("inf")

        chosen = []
        for bound, candidates in CANDIDATES.items():
            if time.time() > until:
                print(f"not run for lack of time: {n}x{k} from {bound} rows on", flush=True)
                break
            # The least tile serves single rows too.
            counts = [1, bound] if bound == 8 else [bound]
            timed = sorted(
                (sum(measure(r, tile_of(c)) for r in counts) / len(counts), c) for c in candidates
            )
            print(f"{n}x{k} rows {bound}: {[(round(us, 1), *c) for us, c in timed[:3]]}")
            chosen.append({"rows": bound} | vars(tile_of(timed[0][1])))
        if len(chosen) == len(CANDIDATES):
            table[f"{n}x{k}"] = {"tiles": chosen}
    return table


def compare_head(
    shapes: list[tuple[int, int]], dtypes: list[torch.dtype], until: float, add: Any
) -> None:
    """The head with its argmax against its floor, the 16-bit one, and a row of logits."""
    bandwidth = copy_gb_per_s()
    for dtype in dtypes:
        for n, k in shapes:
            if time.time() > until:
                print(f"not run for lack of time: {dtype} {n}x{k}", flush=True)
                continue
            weights = [weight(n, k, dtype, i) for i in range(copies(n * k // 2))]
            whole = [torch.randn(n, k, device="cuda", dtype=dtype) for _ in range(2)]
            done = torch.zeros(int4_gemm.counters(n), dtype=torch.int32, device="cuda")
            size = weights[0].words.nbytes + weights[0].scale.nbytes
            for rows in ROWS:
                x = torch.randn(rows, k, device="cuda", dtype=dtype)
                ours = graph_us([lambda w=w: best(x, w) for w in weights])
                logits = graph_us(
                    [lambda w=w: int4_gemm.apply(x, w, None, done, 0).argmax(-1) for w in weights]
                )
                wide = graph_us([lambda w=w: gemm.gemm_argmax(x, w, None, 0) for w in whole])
                floor = size / bandwidth / 1e3
                add(
                    op="int4_argmax", dtype=str(dtype).removeprefix("torch."), n=n, k=k, rows=rows,
                    ours_us=round(ours, 2), floor_us=round(floor, 2),
                    of_floor=round(floor / ours, 3), copy_gb_per_s=round(bandwidth),
                    tflops=round(2 * rows * n * k / ours / 1e6, 1),
                    logits_and_argmax_us=round(logits, 2), argmax_16bit_us=round(wide, 2),
                )  # fmt: skip
            del weights, whole
            torch.cuda.empty_cache()


def compare_pass(dtype: torch.dtype, add: Any) -> None:
    """The linears and the head of one draft pass of the 9B. Attention and norms, which no switch
    changes, are left out."""
    (vocabulary, depth), (short, _) = SHAPES
    dense = [torch.randn(n, k, device="cuda", dtype=dtype) for n, k in LAYER]
    small = [weight(n, k, dtype, i) for i, (n, k) in enumerate(LAYER)]
    done = [
        torch.zeros(max(gemm.counters(n), int4_gemm.counters(n)), dtype=torch.int32, device="cuda")
        for n, _ in LAYER
    ]
    wide = torch.randn(vocabulary, depth, device="cuda", dtype=dtype)
    head, listed = weight(vocabulary, depth, dtype, 0), weight(short, depth, dtype, 1)
    ids = torch.randperm(vocabulary, device="cuda")[:short]
    Step = Callable[[list[torch.Tensor]], Any]

    def layer_16(xs: list[torch.Tensor]) -> None:
        for x, w, d in zip(xs, dense, done, strict=True):
            gemm.gemm(x, w, None, d, 0)

    def layer_4(xs: list[torch.Tensor]) -> None:
        for x, w, d in zip(xs, small, done, strict=True):
            int4_gemm.apply(x, w, None, d, 0)

    heads: dict[str, Step] = {
        "16-bit": lambda xs: gemm.gemm_argmax(xs[1], wide, None, 0),
        "int4": lambda xs: best(xs[1], head),
        "int4, shortlist": lambda xs: ids[best(xs[1], listed)[1]],
    }
    variants: list[tuple[str, Step, str]] = [
        ("16-bit", layer_16, "16-bit"), ("16-bit", layer_16, "int4"),
        ("16-bit", layer_16, "int4, shortlist"), ("int4", layer_4, "int4"),
        ("int4", layer_4, "int4, shortlist"),
    ]  # fmt: skip
    for rows in (1, 8, 32, 64):
        xs = [torch.randn(rows, k, device="cuda", dtype=dtype) for _, k in LAYER]
        first = None
        for layer_name, layer, head_name in variants:
            us = graph_us([lambda layer=layer, h=heads[head_name]: (layer(xs), h(xs))])
            first = first or us
            add(
                op="draft_pass", dtype=str(dtype).removeprefix("torch."), rows=rows,
                layer=layer_name, head=head_name, us=round(us, 2), speed_up=round(first / us, 3),
            )  # fmt: skip


def compare_making(add: Any) -> None:
    """How long the head takes to make at load, and the memory beside its own."""
    n, k = SHAPES[0]
    whole = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    quantise_words(whole[:4096], None, GROUP)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, begin = torch.cuda.memory_allocated(), time.time()
    made = quantise_words(whole, None, GROUP)
    torch.cuda.synchronize()
    seconds = time.time() - begin
    size = made.words.nbytes + made.scale.nbytes
    peak = torch.cuda.max_memory_allocated() - before - size
    add(op="making", n=n, k=k, seconds=round(seconds, 2), mib=round(size / 2**20),
        peak_extra_mib=round(peak / 2**20))  # fmt: skip


def compare(
    shapes: list[tuple[int, int]], dtypes: list[torch.dtype], until: float, save: Any
) -> None:
    """All of it; ``save`` gets the rows after each."""
    rows: list[dict[str, Any]] = []

    def add(**row: Any) -> None:
        rows.append(row)
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        save(rows)

    compare_making(add)
    torch.cuda.empty_cache()
    compare_pass(dtypes[-1], add)
    torch.cuda.empty_cache()
    compare_head(shapes, dtypes, until, add)


def main() -> None:
    """Command line."""
    arguments = gemm_command.parser(__doc__.splitlines()[0]).parse_args()
    gemm_command.run(arguments, int4_argmax.OP, SHAPES, MORE, tune, compare)


if __name__ == "__main__":
    main()
