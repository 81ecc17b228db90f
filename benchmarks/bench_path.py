"""Norms and attention on a CUDA device: choose the launches, and race vLLM's kernels.

    python benchmarks/bench_path.py tune --out tune.jsonl        # needs torch and triton
    python benchmarks/bench_path.py compare --tune tune.jsonl --out path.json   # vLLM's CUDA ops
    python benchmarks/bench_path.py norms --out norms.json       # launches of the norms

Every time is the median of graph replays with the data rotated past the L2; a comparison times both
sides and the copy bandwidth in one run. All commands go on where their output file ends, and a row
is on disk as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.timing import copies, copy_gb_per_s, graph_us, head, in_turn_us
from vllm_b70.ops import attention, norm
from vllm_b70.ops.attention import Launch, Partition, Plan

HEADS, BLOCK = 4, 528
#: (sequences, keys, queries of each)
DECODES = [(1, 2048, 1), (1, 8192, 1), (1, 32768, 1), (64, 2048, 1), (64, 8192, 1), (64, 32768, 1)]
VERIFICATIONS = [(1, 8192, 4), (64, 2048, 4), (64, 8192, 4)]
PREFILLS = [(1, 8192, 8192), (1, 32768, 2048), (8, 2048, 2048)]

#: What is tried. Partitions are arithmetic, launches are free.
PARTITIONS = [Partition(*c) for c in ((256, 64), (256, 32), (512, 64), (512, 32), (128, 64))]
SPLITS = [  # the launch and the programs on a multiprocessor
    (Launch(16, 4, 3), 2),
    (Launch(16, 4, 3, 168), 3),
    (Launch(16, 4, 2), 2),
    (Launch(16, 8, 3), 1),
    (Launch(16, 4, 3), 4),
]
WALKS = {
    64: [Launch(128, 8, 2), Launch(128, 8, 3), Launch(64, 4, 2)],
    32: [Launch(128, 8, 3), Launch(64, 4, 3), Launch(128, 8, 2)],
}


class Attention:
    """The data of one shape."""

    def __init__(self, shape: tuple[int, int, int], group: int, size: int, dtype: torch.dtype):
        self.sequences, self.keys, self.width = shape
        self.size, self.dtype = size, dtype
        per = -(-self.keys // BLOCK)
        self.kv_bytes = self.sequences * self.keys * HEADS * 2 * size * 2
        number = copies(self.kv_bytes) if self.kv_bytes < 160 * 2**20 else 1
        total = per * self.sequences
        self.kv = [
            torch.empty(total, HEADS, BLOCK, 2 * size, dtype=dtype, device="cuda").normal_()
            for _ in range(number)
        ]
        order = torch.randperm(total, device="cuda").int()
        self.table = order.view(self.sequences, per)
        tokens = self.sequences * self.width
        self.q = torch.randn(tokens, HEADS * group, size, device="cuda").to(dtype)
        self.out = torch.empty_like(self.q)
        self.starts = torch.arange(self.sequences + 1, device="cuda").int() * self.width
        self.lengths = torch.full((self.sequences,), self.keys, device="cuda").int()
        #: Products of a query and a key, counted once for scores and once for values.
        pairs = self.width * self.keys - self.width * (self.width - 1) // 2
        self.flops = 4 * self.sequences * pairs * HEADS * group * size

    def ours(self, plan: Plan, max_length: int | None = None) -> list[Callable[[], Any]]:
        """One call for each copy of the cache."""
        return [
            lambda k=k, v=v: attention.launch(
                self.q, k, v, self.out, self.table, self.starts, self.lengths, self.size**-0.5,
                self.width, max_length or self.keys, plan,
            )
            for k, v in (kv.transpose(1, 2).split(self.size, dim=-1) for kv in self.kv)
        ]  # fmt: skip

    def vllm(self) -> list[Callable[[], Any]]:
        """vLLM's Triton backend with the buffers and the threshold of its decode graphs."""
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        heads, segments, limit = self.q.shape[1], 16, 128 // HEADS
        acc = torch.empty(limit, heads, segments, self.size, device="cuda")
        top, total = (torch.empty(limit, heads, segments, device="cuda") for _ in range(2))
        scale = torch.ones(1, device="cuda").expand(self.sequences, HEADS)
        return [
            lambda k=k, v=v: unified_attention(
                q=self.q, k=k, v=v, out=self.out, cu_seqlens_q=self.starts,
                max_seqlen_q=self.width, seqused_k=self.lengths, max_seqlen_k=self.keys,
                softmax_scale=self.size**-0.5, causal=True, window_size=(-1, -1),
                block_table=self.table, softcap=0.0, q_descale=None, k_descale=scale,
                v_descale=scale, seq_threshold_3D=limit, num_par_softmax_segments=segments,
                softmax_segm_output=acc, softmax_segm_max=top, softmax_segm_expsum=total,
            )
            for k, v in (kv.transpose(1, 2).split(self.size, dim=-1) for kv in self.kv)
        ]  # fmt: skip


class Rows:
    """Results on disk, one JSON line each; what is there already is not measured again."""

    def __init__(self, path: Path):
        self.path, self.rows = path, []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def has(self, **key: Any) -> bool:
        return any(all(row.get(k) == v for k, v in key.items()) for row in self.rows)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)


def replays_of(flops_or_bytes: float) -> int:
    """Fewer replays for long calls: a call of milliseconds varies little."""
    return 5 if flops_or_bytes > 2e9 else 15


def _compile(job: tuple[int, int, str, Plan, int]) -> str | None:
    """In a process of its own: fill Triton's cache for one plan."""
    size, group, dtype, plan, width = job
    try:
        small = Attention((64, 300, width), group, size, getattr(torch, dtype))
        # The kernels are compiled for powers of two of sequences: as many as are timed.
        for sequences in (64, 1) if width == 1 else (1,):
            small.starts, small.lengths = small.starts[: sequences + 1], small.lengths[:sequences]
            small.ours(plan)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{plan}: {str(error)[:200]}"
    return None


def compile_all(jobs: list[tuple[int, int, str, Plan, int]], workers: int) -> None:
    """Compile in parallel, so that timing finds every kernel in Triton's cache."""
    began = time.time()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for failed in pool.imap_unordered(_compile, jobs):
            if failed:
                print("cannot launch", failed, flush=True)
    print(f"compiled {len(jobs)} plans in {time.time() - began:.0f} s", flush=True)


def candidates(size: int, group: int) -> Iterator[tuple[str, Plan]]:
    """Every plan to try, as (tier it varies, plan)."""
    base = attention.plan(size, 1)
    for partition in PARTITIONS:
        for split, programs in SPLITS:
            yield "split", replace(base, partition=partition, split=split, programs=programs)
        for walk in WALKS[partition.tile]:
            yield "walk", replace(base, partition=partition, walk=walk)


def tune(arguments: argparse.Namespace, until: float) -> None:
    """Time every candidate; the first output row of a plan that fails holds infinity."""
    rows = Rows(arguments.out)
    size, dtype = arguments.size, arguments.dtype
    plans = list(candidates(size, 4))
    key = {"size": size, "dtype": dtype}
    jobs = [(size, 4, dtype, plan, 1 if tier == "split" else 40) for tier, plan in plans]
    if not arguments.no_compile:
        compile_all(jobs, arguments.workers)
    for shape in [*DECODES, *VERIFICATIONS[2:], *PREFILLS[:2]]:
        name = "x".join(map(str, shape))
        todo = [
            (tier, plan)
            for tier, plan in plans
            if (tier == "split") == (shape[2] <= 17)
            and not rows.has(op="tune", shape=name, plan=asdict(plan), **key)
        ]
        if not todo:
            continue
        data = Attention(shape, 4, size, getattr(torch, dtype))
        for _, plan in todo:
            if time.time() > until:
                print("not run for lack of time:", name, plan, flush=True)
                return
            try:
                us = graph_us(data.ours(plan), replays_of(data.kv_bytes + data.flops / 100))
            except Exception as error:
                print(f"cannot time {plan}: {str(error)[:160]}", flush=True)
                us = 1e9
            rows.add(op="tune", shape=name, us=round(us, 2), plan=asdict(plan), **key)
        del data
        torch.cuda.empty_cache()


def chosen(path: Path | None, size: int) -> Plan:
    """The best plan that a tune run found: the partition by all shapes, the launches by theirs."""
    base = attention.plan(size, 1)
    if path is None or not path.exists():
        return base
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row["op"] == "tune" and row["size"] == size]

    def best(partition: Partition, tier: str) -> tuple[float, Plan]:
        """The plan with the least sum of log times over the shapes of a tier."""
        scores: dict[str, list[float]] = {}
        for row in rows:
            plan = row["plan"]
            if plan["partition"] != asdict(partition):
                continue
            if (tier == "split") == (int(row["shape"].split("x")[2]) <= 17):
                scores.setdefault(json.dumps(plan), []).append(math.log(row["us"]))
        full = max((len(s) for s in scores.values()), default=0)
        found = min(
            ((sum(s), plan) for plan, s in scores.items() if len(s) == full), default=(1e9, "")
        )
        plan = json.loads(found[1]) if found[1] else asdict(base)
        return found[0], Plan(
            partition, Launch(**plan["split"]), Launch(**plan["walk"]), plan["programs"]
        )

    ranked = []
    for partition in PARTITIONS:
        split, walk = best(partition, "split"), best(partition, "walk")
        ranked.append((split[0] + walk[0], replace(split[1], walk=walk[1].walk)))
        print(f"{partition}: log score {split[0]:.2f} + {walk[0]:.2f}: {ranked[-1][1]}", flush=True)
    return min(ranked, key=lambda pair: pair[0])[1]


def for_width(plan: Plan, rows: int) -> Plan:
    """The plan with wider row tiles where a sequence has more rows, as ``ops.attention`` does."""
    return plan if rows <= 16 else replace(plan, split=attention.plan(256, rows).split)


def compare_attention(rows: Rows, arguments: argparse.Namespace, until: float) -> None:
    """Ours against vLLM's Triton backend."""
    plan = chosen(arguments.tune, arguments.size)
    print("plan", plan, flush=True)
    bandwidth = copy_gb_per_s()
    print(f"copy {bandwidth:.0f} GB/s", flush=True)
    cases = [(4, arguments.dtype, s) for s in [*DECODES, *VERIFICATIONS, *PREFILLS]]
    cases += [(6, "float16", s) for s in (DECODES[1], DECODES[4], VERIFICATIONS[2], PREFILLS[0])]
    for group, dtype, shape in cases:
        name = "x".join(map(str, shape))
        key = {"op": "attention", "shape": name, "group": group, "dtype": dtype}
        if rows.has(**key):
            continue
        if time.time() > until:
            print("not run for lack of time:", key, flush=True)
            continue
        data = Attention(shape, group, arguments.size, getattr(torch, dtype))
        replays = replays_of(data.kv_bytes + data.flops / 100)
        its_plan = for_width(plan, shape[2] * group)
        ours = graph_us(data.ours(its_plan), replays)
        # As a decode graph of a server with room for 128K: the schedule is worked out on device.
        roomy = graph_us(data.ours(its_plan, 131072), replays) if shape[2] <= 17 else ours
        peer = graph_us(data.vllm(), replays)
        rows.add(
            **key, size=arguments.size, ours_us=round(ours, 2), ours_128k_us=round(roomy, 2),
            peer="vllm_triton_attn", peer_us=round(peer, 2), ratio=round(peer / ours, 3),
            gb_per_s=round(data.kv_bytes / ours / 1e3, 1),
            of_copy=round(data.kv_bytes / ours / 1e3 / bandwidth, 3),
            tflops=round(data.flops / ours / 1e6, 1),
        )  # fmt: skip
        del data
        torch.cuda.empty_cache()


#: (rows, columns): of the hidden state of the 9B and the 27B; of the 9B's 4 key and 16 query heads;
#: of the heads of its gated delta net.
TOKENS = (1, 64, 4096)
NORMS = [(tokens, columns) for columns in (4096, 5120) for tokens in TOKENS]
QK_NORMS = [(tokens * heads, 256) for tokens in TOKENS for heads in (4, 16)]
HEAD_NORMS = [(tokens * 32, 128) for tokens in TOKENS]


def norms(rows: Rows, until: float) -> Iterator[Norm]:
    """Every norm that is timed and has no row yet, as long as there is time."""
    shapes = {"rms_norm": NORMS + QK_NORMS, "add_rms_norm": NORMS, "gated_rms_norm": HEAD_NORMS}
    for op, count, columns in [(name, *shape) for name in shapes for shape in shapes[name]]:
        key = {"op": op, "rows": count, "columns": columns}
        if rows.has(**key):
            continue
        if time.time() > until:
            print("not run for lack of time:", key, flush=True)
            continue
        yield Norm(op, count, columns)


class Norm:
    """The data of one norm; ``key`` names it in a row."""

    def __init__(self, op: str, count: int, columns: int):
        self.key = {"op": op, "rows": count, "columns": columns}
        self.op, tensors = op, {"rms_norm": 2, "add_rms_norm": 4, "gated_rms_norm": 3}[op]
        self.bytes = count * columns * tensors * 2
        number = copies(count * columns * 2 * 2)
        self.xs = [
            torch.randn(count, columns, device="cuda").to(torch.bfloat16) for _ in range(number)
        ]
        self.others = [torch.randn_like(x) for x in self.xs]
        self.weight = torch.randn(columns, device="cuda").to(torch.bfloat16)

    def copy(self) -> list[Callable[[], Any]]:
        """Copies that read and write as many bytes: the floor; for one row it is the launch."""
        sources = [
            torch.empty(self.bytes // 4, dtype=torch.bfloat16, device="cuda") for _ in self.xs
        ]
        targets = [torch.empty_like(s) for s in sources]
        pairs = zip(sources, targets, strict=True)
        return [lambda s=s, t=t: t.copy_(s) for s, t in pairs]

    def launches(self, programs: int | None, warps: int | None) -> list[Callable[[], Any]]:
        """One call for each copy of the rows, with rows and warps of a program."""
        options: dict[str, Any] = {"rows_a_program": programs, "warps": warps}
        gated = {"gate": "silu"} if self.op == "gated_rms_norm" else {}
        name = {"add_rms_norm": "residual", "gated_rms_norm": "z"}.get(self.op)
        return [
            lambda x=x, o=o: norm.launch(
                x, self.weight, 1e-6, **({name: o} if name else {}), **gated, **options
            )
            for x, o in zip(self.xs, self.others, strict=True)
        ]


#: What is tried for norms of rows and of heads: rows and warps of a program. The first is what
#: ``ops.norm`` does.
ROW_LAUNCHES = [(None, None), (1, 1), (1, 2), (1, 4), (1, 8), (1, 16)]
HEAD_LAUNCHES = [
    (None, None), (1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8)
]  # fmt: skip


def tune_norms(rows: Rows, until: float) -> None:
    """Time every launch of the norms; a line a shape."""
    for data in norms(rows, until):
        found: dict[str, float] = {}
        bits = None
        for programs, warps in HEAD_LAUNCHES if data.key["columns"] <= 256 else ROW_LAUNCHES:
            calls = data.launches(programs, warps)
            got = calls[0]()[0]
            bits = got if bits is None else bits
            name = "chosen" if programs is None else f"{programs}x{warps}"
            found[name] = round(graph_us(calls), 2) if torch.equal(got, bits) else math.inf
        floor = round(graph_us(data.copy()), 2)
        best = min(found, key=lambda name: found[name])
        rows.add(
            **data.key, floor_us=floor, of_floor=round(floor / found["chosen"], 3), best=best,
            best_of_floor=round(floor / found[best], 3), us=found,
        )  # fmt: skip


def compare_norms(rows: Rows, until: float) -> None:
    """Ours against vLLM's CUDA kernels, and against a copy of the same bytes."""
    try:
        import vllm._custom_ops as vllm_ops
        from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant
    except Exception as error:
        print("no vLLM:", str(error)[:160], flush=True)
        vllm_ops = None
    for data in norms(rows, until):
        op, xs, weight = data.op, data.xs, data.weight
        pairs = list(zip(xs, data.others, strict=True))
        extra: dict[str, Any] = {}
        if op == "rms_norm":
            calls = [lambda x=x: norm.rms_norm(x, weight, 1e-6, 1.0) for x in xs]
        elif op == "add_rms_norm":
            calls = [lambda x=x, r=r: norm.add_rms_norm(x, r, weight, 1e-6, 1.0) for x, r in pairs]
        else:
            calls = [
                lambda x=x, z=z: norm.gated_rms_norm_gpu(x, z, weight, 1e-6, False)
                for x, z in pairs
            ]
        ours, floor = in_turn_us(calls, data.copy())
        peers: dict[str, list[Callable[[], Any]]] = {}
        if vllm_ops is not None and op == "rms_norm":
            peers["vllm_c"] = [
                lambda x=x, o=o: vllm_ops.rms_norm(o, x, weight, 1e-6) for x, o in pairs
            ]
            peers["rms_norm_batch_invariant"] = [
                lambda x=x: rms_norm_batch_invariant(x, weight, 1e-6) for x in xs
            ]
        elif vllm_ops is not None and op == "add_rms_norm":
            peers["vllm_c"] = [
                lambda x=x, r=r: vllm_ops.fused_add_rms_norm(x, r, weight, 1e-6) for x, r in pairs
            ]
        for name, peer_calls in peers.items():
            try:
                extra[f"{name}_us"] = round(graph_us(peer_calls), 2)
            except Exception as error:
                print(f"peer {name}: {str(error)[:160]}", flush=True)
        rows.add(
            **data.key, ours_us=round(ours, 2), floor_us=round(floor, 2),
            of_floor=round(floor / ours, 3),
            gb_per_s=round(data.bytes / ours / 1e3, 1), **extra,
        )  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["tune", "compare", "norms"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune", type=Path, help="compare: take the best plan of a tune run")
    parser.add_argument("--size", type=int, default=256, help="head size")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--no-compile", action="store_true", help="tune: Triton's cache is filled")
    parser.add_argument("--seconds", type=float, default=200.0, help="stop starting new work then")
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    torch.manual_seed(0)
    if arguments.command == "tune":
        tune(arguments, until)
        chosen(arguments.out, arguments.size)
        return
    rows = Rows(arguments.out.with_suffix(".jsonl"))
    if arguments.command == "norms":
        tune_norms(rows, until)
    else:
        compare_norms(rows, until)
        compare_attention(rows, arguments, until)
    arguments.out.write_text(json.dumps(head() | {"rows": rows.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
