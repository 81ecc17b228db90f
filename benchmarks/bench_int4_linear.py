"""The INT4 GEMM on a CUDA device: make the tile table, and race the kernels people use today.

    python benchmarks/bench_int4_linear.py tune --out tiles.json      # needs torch and triton
    python benchmarks/bench_int4_linear.py compare --out result.json  # peers need vLLM's CUDA ops

Every time is the median of graph replays with weights rotated past the L2; a comparison times both
sides in one run.
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
from benchmarks.timing import copies, graph_us
from vllm_b70.ops import hopper, int4_gemm, split
from vllm_b70.ops.int4_words import Int4Words, pack_words
from vllm_b70.ops.tiles import Tile

SHAPES = [(24576, 4096), (4096, 12288), (10240, 4096), (4096, 4096)]
#: The 27B's.
MORE = [(34816, 5120), (5120, 17408)]
ROWS = [1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096]
GROUP = 128

#: Row counts that a tile is chosen for, and what is tried there: (bn, bm, warps, stages).
CANDIDATES: dict[int, list[tuple[int, int, int, int]]] = {
    16: [(64, 16, 4, 2), (64, 16, 4, 3), (64, 16, 4, 4), (64, 16, 4, 5), (128, 16, 4, 3),
         (128, 16, 4, 4), (128, 16, 4, 5), (128, 16, 8, 3)],
    32: [(64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (128, 32, 8, 3), (128, 32, 4, 3)],
    64: [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (128, 64, 8, 3),
         (128, 64, 4, 3)],
    128: [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 8, 3),
          (128, 128, 8, 3), (128, 64, 4, 3)],
    256: [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 8, 3),
          (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3)],
    512: [(64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3),
          (128, 64, 4, 3)],
    1024: [(64, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 4),
           (128, 64, 4, 3), (128, 64, 4, 2)],
    4096: [(64, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 4)],
}  # fmt: skip
#: Where there is a Hopper: its kernel's tiles, from how many rows on they are tried. The warps and
#: stages are those of the walk that serves in its place.
HOPPER = [
    Tile("hopper", hopper.BN, bm, 8, 3, cut=cut)
    for bm in hopper.BM
    for cut in ("", "tiles", "parts")
]
HOPPER_ROWS = 64
#: K partitions to try, by columns.
PARTS = {
    4096: [3, 4, 5, 6, 8],
    5120: [4, 6, 8, 12],
    10240: [2, 3, 4, 5, 6],
    24576: [1, 2, 3, 4],
    34816: [1, 2, 3],
}


def weight(columns: int, depth: int, dtype: torch.dtype, seed: int) -> Int4Words:
    """A random symmetric weight, packed on the device."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scale = torch.rand(depth // GROUP, columns, device="cuda", generator=generator) * 0.01
    return pack_words(
        lambda a, b: torch.randint(0, 16, (b - a, columns), device="cuda", generator=generator),
        depth, columns, scale, None, GROUP, dtype,
    )  # fmt: skip


def run(x: torch.Tensor, w: Int4Words, done: torch.Tensor, parts: int, tile: Tile) -> torch.Tensor:
    """One launch of a given tile."""
    out = torch.empty(x.shape[0], w.columns, dtype=x.dtype, device=x.device)
    int4_gemm.launch(x, w.words, w.scale, w.offset, None, done, out, w.group, parts, tile, ptx=True)
    return out


def fits(tile: Tile, rows: int, columns: int, parts: int) -> bool:
    """Whether a split launch stays inside the workspace."""
    return tile.kernel != "split" or split.fits(parts, rows, columns)


def options(rows: int, columns: int, parts: int) -> list[Tile]:
    """The launches to try."""
    kernels = ["split"] if rows <= 16 else ["walk"] if parts == 1 else ["split", "walk"]
    found = [Tile(k, *c) for k in kernels for c in CANDIDATES[rows]]
    if rows >= HOPPER_ROWS and hopper.available(torch.device("cuda")):
        found += HOPPER
    return [t for t in found if fits(t, rows, columns, parts)]


def _compile(job: tuple[int, int, list[tuple[int, int, Tile]]]) -> list[str]:
    """In a process of its own: fill Triton's cache for one shape's launches."""
    columns, depth, launches = job
    w = weight(columns, depth, torch.float16, 0)
    done = torch.zeros(int4_gemm.counters(columns), dtype=torch.int32, device="cuda")
    failed = []
    for rows, parts, tile in launches:
        x = torch.randn(rows, depth, device="cuda", dtype=torch.float16)
        try:
            run(x, w, done, parts, tile)
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{columns}x{depth} {rows} {parts} {tile}: {str(error)[:200]}")
    return failed


def compile_all(jobs: list[tuple[int, int, list[tuple[int, int, Tile]]]], workers: int) -> None:
    """Compile launches in parallel, so that timing them afterwards finds them cached."""
    pieces = [(n, k, launches[i::8]) for n, k, launches in jobs for i in range(8) if launches[i::8]]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for failed in pool.imap_unordered(_compile, pieces):
            for line in failed:
                print("cannot launch", line, flush=True)


def tune(shapes: list[tuple[int, int]], until: float) -> dict[str, Any]:
    """The table's entries for these shapes; stops at the time ``until``."""
    jobs = []
    for n, k in shapes:
        launches = [(r, p, t) for r in CANDIDATES for p in PARTS[n] for t in options(r, n, p)]
        jobs.append((n, k, launches))
    begin = time.time()
    compile_all(jobs, 14)
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    table: dict[str, Any] = {}
    for n, k in shapes:
        number = copies(n * k // 2)
        weights = [weight(n, k, torch.float16, i) for i in range(number)]
        done = torch.zeros(int4_gemm.counters(n), dtype=torch.int32, device="cuda")
        reference: dict[int, torch.Tensor] = {}
        full = torch.randn(4096, k, device="cuda", dtype=torch.float16)

        def measure(rows: int, parts: int, tile: Tile) -> float:
            x = full[:rows].contiguous()
            got = run(x, weights[0], done, parts, tile)
            if parts not in reference:
                tile_of_all = Tile("walk", 128, 128, 8, 3)
                reference[parts] = run(full, weights[0], done, parts, tile_of_all)
            differing = int((got != reference[parts][:rows]).sum())
            if differing:
                print(f"DIFFERING {differing} {n}x{k} rows {rows} {parts} {tile}", flush=True)
                return float("inf")
            return graph_us([lambda w=w: run(x, w, done, parts, tile) for w in weights], 7)

        def attempt(rows: int, parts: int, tile: Tile) -> float:
            try:
                return measure(rows, parts, tile)
            except Exception as error:
                print(f"failed {n}x{k} {rows} {parts} {tile}: {str(error)[:160]}", flush=True)
                return float("inf")

        best: dict[int, dict[int, tuple[float, Tile]]] = {}
        for parts in PARTS[n]:
            for rows in CANDIDATES:
                if time.time() > until:
                    break
                # Up to 16 rows one tile serves all, and a single row is the common case.
                timed = [
                    (
                        (attempt(1, parts, t) + attempt(16, parts, t)) / 2
                        if rows == 16
                        else attempt(rows, parts, t),
                        t,
                    )
                    for t in options(rows, n, parts)
                ]
                best.setdefault(parts, {})[rows] = min(timed, key=lambda pair: pair[0])
            line = [(r, round(us, 1), str(t)[5:-1]) for r, (us, t) in best.get(parts, {}).items()]
            print(f"{n}x{k} parts {parts}: {line}", flush=True)
        found = gemm_command.entry(best, list(CANDIDATES))
        if found is not None:
            table[f"{n}x{k}"] = found
            print(f"{n}x{k}: {found['parts']} parts", flush=True)
    return table


Peer = Callable[[torch.Tensor], torch.Tensor]


VLLM_PEERS = {
    "marlin": "MarlinLinearKernel",
    "machete": "MacheteLinearKernel",
    "conch": "ConchLinearKernel",
    "vllm_triton_w4a16": "TritonW4A16LinearKernel",
    "humming": "HummingLinearKernel",
}


def vllm_peers(
    n: int, k: int, dtype: torch.dtype, number: int, names: list[str]
) -> dict[str, list[Peer]]:
    """Some of ``VLLM_PEERS``, vLLM's own mixed-precision kernels, on ``number`` random weights."""
    from vllm.config import (
        VllmConfig,
        get_current_vllm_config_or_none,
        set_current_vllm_config,
    )
    from vllm.model_executor import parameter
    from vllm.model_executor.kernels.linear import mixed_precision as mp
    from vllm.scalar_type import scalar_types

    parameter.get_tensor_model_parallel_rank = lambda: 0  # type: ignore[assignment]
    parameter.get_tensor_model_parallel_world_size = lambda: 1  # type: ignore[assignment]
    config = mp.MPLinearLayerConfig((k, n), (k, n), scalar_types.uint4b8, dtype, GROUP, False)
    peers: dict[str, list[Peer]] = {}
    for name in names:
        class_name = VLLM_PEERS[name]
        try:
            kernel_class = getattr(mp, class_name, None)
            if kernel_class is None:
                import vllm.model_executor.kernels.linear as kernels

                kernel_class = getattr(kernels, class_name)
            can, why = kernel_class.can_implement(config)
            if not can:
                raise RuntimeError(why)
            calls: list[Peer] = []
            # One made up would not do where the plugin is on: its policy asks for a model.
            with set_current_vllm_config(get_current_vllm_config_or_none() or VllmConfig()):
                for _ in range(number):
                    layer = torch.nn.Module()
                    layer.weight_packed = parameter.PackedvLLMParameter(
                        data=torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32,
                                           device="cuda"),
                        input_dim=1, output_dim=0, packed_dim=1, packed_factor=8,
                        weight_loader=print,
                    )  # fmt: skip
                    layer.weight_scale = parameter.GroupQuantScaleParameter(
                        data=(torch.rand(n, k // GROUP, device="cuda") * 0.01).to(dtype),
                        input_dim=1, output_dim=0, weight_loader=print,
                    )  # fmt: skip
                    layer.params_dtype = dtype
                    layer.input_size_per_partition = k
                    layer.output_size_per_partition = n
                    layer.output_partition_sizes = [n]
                    layer.input_size, layer.output_size = k, n
                    layer.prefix, layer.bias, layer.has_bias = "layer", None, False
                    kernel = kernel_class(config, "weight_packed", "weight_scale", None)
                    kernel.process_weights_after_loading(layer)
                    calls.append(
                        lambda x, kernel=kernel, layer=layer: kernel.apply_weights(layer, x)
                    )
                calls[0](torch.randn(4, k, device="cuda", dtype=dtype))
                torch.cuda.synchronize()
            peers[name] = calls
        except Exception as error:
            print(f"peer {name} {n}x{k}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return peers


def torch_peers(n: int, k: int, dtype: torch.dtype, number: int) -> dict[str, list[Peer]]:
    """cuBLAS on 16-bit weights, and torch's own INT4 op (bf16 only)."""
    dense = [torch.randn(n, k, device="cuda", dtype=dtype) for _ in range(max(2, number // 4))]
    peers: dict[str, list[Peer]] = {
        "cublas_16bit": [lambda x, w=w: torch.nn.functional.linear(x, w) for w in dense]
    }
    if dtype == torch.bfloat16:
        try:
            packed = [
                torch.ops.aten._convert_weight_to_int4pack(
                    torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device="cuda"), 8
                )
                for _ in range(number)
            ]
            scales = torch.rand(k // GROUP, n, 2, device="cuda").to(dtype)
            peers["torch_int4pack_mm"] = [
                lambda x, w=w: torch.ops.aten._weight_int4pack_mm(x, w, GROUP, scales)
                for w in packed
            ]
        except Exception as error:
            print(f"peer torch_int4pack_mm {n}x{k}: {str(error)[:200]}", flush=True)
    return peers


def compare(
    shapes: list[tuple[int, int]],
    dtypes: list[torch.dtype],
    names: list[str],
    until: float,
    save: Any,
) -> None:
    """Time ours and every peer; ``save`` is called with the rows after each shape."""
    rows_out: list[dict[str, Any]] = []
    for dtype in dtypes:
        for n, k in shapes:
            if time.time() > until:
                print(f"not run for lack of time: {dtype} {n}x{k}", flush=True)
                continue
            number = copies(n * k // 2)
            weights = [weight(n, k, dtype, i) for i in range(number)]
            done = torch.zeros(int4_gemm.counters(n), dtype=torch.int32, device="cuda")
            peers = vllm_peers(n, k, dtype, number, names) | torch_peers(n, k, dtype, number)
            for rows in ROWS:
                x = torch.randn(rows, k, device="cuda", dtype=dtype)
                ours = graph_us([lambda w=w: int4_gemm.apply(x, w, None, done, 0) for w in weights])
                line = []
                for name, calls in peers.items():
                    try:
                        peer = graph_us([lambda c=c: c(x) for c in calls])
                    except Exception as error:
                        print(f"peer {name} {n}x{k} {rows}: {str(error)[:160]}", flush=True)
                        continue
                    line.append(f"{name} {peer / ours:.2f}")
                    rows_out.append(
                        {
                            "op": "int4_linear",
                            "dtype": str(dtype).removeprefix("torch."),
                            "n": n,
                            "k": k,
                            "rows": rows,
                            "ours_us": round(ours, 2),
                            "peer": name,
                            "peer_us": round(peer, 2),
                            "ratio": round(peer / ours, 3),
                            "gb_per_s": round(n * k * (0.5 + 2 / GROUP) / ours / 1e3, 1),
                            "tflops": round(2 * rows * n * k / ours / 1e6, 2),
                        }
                    )
                print(
                    f"{dtype} {n}x{k} rows {rows}: {ours:.1f} us; ratios {', '.join(line)}",
                    flush=True,
                )
            save(rows_out)
            del weights, peers
            torch.cuda.empty_cache()


def main() -> None:
    """Command line."""
    parser = gemm_command.parser(__doc__.splitlines()[0])
    parser.add_argument("--peers", default=",".join(VLLM_PEERS), help="compare: of vLLM's kernels")
    arguments = parser.parse_args()
    names = arguments.peers.split(",")
    gemm_command.run(
        arguments, int4_gemm.OP, SHAPES, MORE, tune,
        lambda shapes, dtypes, until, save: compare(shapes, dtypes, names, until, save),
    )  # fmt: skip


if __name__ == "__main__":
    main()
