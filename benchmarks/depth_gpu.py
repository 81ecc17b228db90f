"""Draft depths on a GPU: steps at depth 0, and a schedule against every fixed depth.

    python benchmarks/depth_gpu.py agree DIR/wide-9b DIR/agree-9b
    python benchmarks/depth_gpu.py cell --model DIR/agree-9b --depth 3 --out CELLS/d3.json
    python benchmarks/depth_gpu.py cell --model DIR/agree-9b --schedule '[[1,8,3],[9,64,0]]' --out …
    python benchmarks/depth_gpu.py cell --model DIR/agree-9b --tuned CELLS --out CELLS/tuned.json
    python benchmarks/depth_gpu.py collect CELLS --out depth.json

``agree`` makes a checkpoint of the same widths whose MTP head guesses well: every layer adds
nothing, so both heads go by the last token; ``--noise`` says how badly the MTP head sees it. A cell
is one engine; each number of users is measured while all of them decode, and so many times. A
``--tuned`` cell has the schedule that is best by the fixed depths among the cells.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.exact_gpu import wait_for_turn
from vllm_b70.harness.depth_model import DepthModel, Measurement
from vllm_b70.speculation.schedule import depth_by_batch

ROUNDS, PROMPT = 3, 32
#: Aimed at: a step at depth 0 against one without speculation, a schedule against the best depth.
SLOWER_STEP, SLOWER_SCHEDULE = 1.015, 0.98


def agree(arguments: argparse.Namespace) -> None:
    """Copy a checkpoint with layers that add nothing and an MTP head that follows the embedding."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(arguments.source, arguments.target)
    for path in arguments.target.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            module = name.rsplit(".", 1)[0]
            if module.endswith((".out_proj", ".o_proj", ".down_proj")):
                if name.endswith((".weight", ".weight_scale", ".scales")):
                    weight.zero_()
            if name.endswith("mtp.fc.weight"):
                size = weight.shape[0]
                noise = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
                near = torch.eye(size) + arguments.noise * noise / size**0.5
                weights[name] = torch.cat([near, 0 * near], 1).to(weight.dtype)
        # What was loaded may still lie in the file.
        save_file(weights, path.with_suffix(".partial"), metadata={"format": "pt"})
        path.with_suffix(".partial").replace(path)


def decode(engine: Any, users: int, tokens: int) -> list[tuple[float, int]]:
    """Answer so many users; seconds and tokens of each step in which all of them decode."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for user in range(users):
        prompt = [1 + (37 * user + 11 * i) % 997 for i in range(PROMPT)]
        engine.add_request(
            f"{time.perf_counter_ns()}-{user}", TokensPrompt(prompt_token_ids=prompt), greedy
        )
    lengths: dict[str, int] = {}
    steps: list[tuple[float, int]] = []
    last, counting, finished = time.perf_counter(), False, False
    while engine.has_unfinished_requests():
        before = sum(lengths.values())
        for output in engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)
            finished |= output.finished
        now = time.perf_counter()
        if counting and not finished:
            steps.append((now - last, sum(lengths.values()) - before))
        # The first steps after the prompts still verify what was drafted beside those.
        counting, last = len(lengths) == users and min(lengths.values()) > 8, now
    return steps


def steady(engine: Any, users: int, tokens: int) -> tuple[float, float]:
    """Tokens a second, and the median step in ms, while so many users decode.

    Raises:
        SystemExit: The first user is done before the last one has begun.
    """
    steps = decode(engine, users, tokens)
    if not steps:
        raise SystemExit(f"Error: {users} users never decode together: ask for more --new-tokens")
    seconds = sum(step for step, _ in steps)
    return sum(made for _, made in steps) / seconds, 1e3 * statistics.median(s for s, _ in steps)


def counters(engine: Any) -> dict[str, list[int]]:
    """Drafts, and accepted tokens by position, so far."""
    found = {m.name: getattr(m, "values", [getattr(m, "value", 0)]) for m in engine.get_metrics()}
    names = {"drafts": "num_drafts", "accepted": "num_accepted_tokens_per_pos"}
    return {n: list(found.get(f"vllm:spec_decode_{name}", [])) for n, name in names.items()}


def acceptance(before: dict[str, list[int]], after: dict[str, list[int]]) -> list[float]:
    """Accepted tokens per draft, by position."""
    if not after["drafts"] or after["drafts"] == before["drafts"]:
        return []
    drafts = after["drafts"][0] - sum(before["drafts"])
    earlier = before["accepted"] or [0] * len(after["accepted"])
    return [(b - a) / drafts for a, b in zip(earlier, after["accepted"], strict=True)]


def static(folder: Path) -> list[Measurement]:
    """The measurements of the cells with a fixed depth."""
    cells = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [
        Measurement(cell["depth"], level["users"], level["tokens_per_s"], level["acceptance"])
        for cell in cells
        if cell["schedule"] is None
        for level in cell["levels"]
    ]


def run_cell(arguments: argparse.Namespace) -> None:
    """Start an engine and measure it."""
    if arguments.out.exists():
        print(f"{arguments.out.name} is there", flush=True)
        return
    users = [int(part) for part in arguments.users.split(",")]
    schedule = json.loads(arguments.schedule) if arguments.schedule else None
    if arguments.tuned:
        schedule = DepthModel(static(arguments.tuned)).schedule(max(users))
    depth = max(entry[2] for entry in schedule) if schedule else arguments.depth
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_B70": "1"}
    from vllm import EngineArgs, LLMEngine

    options: dict[str, Any] = {}
    if depth:
        speculative = {"method": "mtp", "num_speculative_tokens": depth}
        if schedule:
            speculative["num_speculative_tokens_per_batch_size"] = schedule
        options["speculative_config"] = speculative
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(arguments.model),
            max_model_len=512,
            max_num_seqs=max(users),
            enable_prefix_caching=False,
            kv_cache_memory_bytes=int(arguments.kv_gib * 2**30),
            gpu_memory_utilization=0.2,
            disable_log_stats=False,
            **options,
        )
    )
    levels = []
    decode(engine, max(users), 24)
    if arguments.turn:
        wait_for_turn(arguments.out.parent, arguments.turn)
    for count in users:
        before = counters(engine)
        rounds = [steady(engine, count, arguments.new_tokens) for _ in range(ROUNDS)]
        level = {
            "users": count,
            "tokens_per_s": statistics.median(speed for speed, _ in rounds),
            "step_ms": statistics.median(step for _, step in rounds),
            "acceptance": acceptance(before, counters(engine)),
        }
        levels.append(level)
        shares = [round(share, 2) for share in level["acceptance"]]
        print(
            f"{arguments.out.stem} users {count}: {level['tokens_per_s']:.1f} tok/s, "
            f"{level['step_ms']:.3f} ms a step, accepted {shares}",
            flush=True,
        )
    from benchmarks.timing import head

    cell = {"depth": depth, "schedule": schedule, "levels": levels, **head()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(cell, indent=1) + "\n")


def collect(arguments: argparse.Namespace) -> None:
    """Every schedule against the fixed depths."""
    paths = sorted(arguments.cells.glob("*.json"))
    cells = {path.stem: json.loads(path.read_text()) for path in paths}
    plain = {
        (cell["depth"], level["users"]): level
        for cell in cells.values()
        if cell["schedule"] is None
        for level in cell["levels"]
    }
    rows = []
    for name, cell in cells.items():
        for level in cell["levels"] if cell["schedule"] else ():
            users = level["users"]
            fixed = {k: v["tokens_per_s"] for (k, n), v in plain.items() if n == users}
            row = {"cell": name, "schedule": cell["schedule"], "users": users}
            row["tokens_per_s"] = level["tokens_per_s"]
            if fixed:
                best = max(fixed, key=lambda depth: fixed[depth])
                row |= {"best_depth": best, "against_it": level["tokens_per_s"] / fixed[best]}
                row["within_2_percent"] = row["against_it"] >= SLOWER_SCHEDULE
                same = fixed.get(depth_by_batch(cell["schedule"], users)[users])
                row["against_same_depth"] = same and level["tokens_per_s"] / same
            if not level["acceptance"] and (0, users) in plain:
                row["step_against_none"] = level["step_ms"] / plain[0, users]["step_ms"]
                row["within_1_5_percent"] = row["step_against_none"] <= SLOWER_STEP
            rows.append(row)
            print(row, flush=True)
    first = next(iter(cells.values()), None)
    if first is None:
        raise SystemExit(f"{arguments.cells} has no cells")
    result = {name: first[name] for name in ("device", "versions")}
    result |= {"command": [cell["command"] for cell in cells.values()], "rows": rows}
    result["fixed"] = [
        {"depth": depth, **{k: v for k, v in level.items()}} for (depth, _), level in plain.items()
    ]
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("agree")
    made.add_argument("source", type=Path)
    made.add_argument("target", type=Path)
    made.add_argument("--noise", type=float, default=0.6)
    cell = commands.add_parser("cell")
    cell.add_argument("--model", type=Path, required=True)
    cell.add_argument("--depth", type=int, default=0)
    cell.add_argument("--schedule", help="JSON of num_speculative_tokens_per_batch_size")
    cell.add_argument("--tuned", type=Path, help="folder of cells")
    cell.add_argument("--users", default="1,8,16,32,64")
    cell.add_argument("--turn", help="N/M: start beside M - 1 others, measure as number N")
    cell.add_argument("--new-tokens", type=int, default=128)
    cell.add_argument("--kv-gib", type=float, default=8.0, help="GiB of KV cache and state")
    cell.add_argument("--out", type=Path, required=True)
    together = commands.add_parser("collect")
    together.add_argument("cells", type=Path)
    together.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    {"agree": agree, "cell": run_cell, "collect": collect}[arguments.command](arguments)


if __name__ == "__main__":
    main()
