"""Zero flips on a GPU: cells of one engine each, and the comparison of all with the solo oracle.

    python benchmarks/exact_gpu.py cell --model DIR --depth 3 --users 8,64 --out DIR/cell.json
    python benchmarks/exact_gpu.py collect DIR --out exact.json

A cell is one engine: a model, a dtype, a route, a draft depth and graphs on or off; it answers the
same prompts once for each number of users. The route is ``exact``, which is the plugin, ``native``
or ``auto``, which are the plugin with such linears, or ``stock``. A cell that is there already is
not run again. ``collect`` compares every cell with the cell of its route that has depth 0 and one
user, and replicas (``--replica``) with the cell that they repeat.

Engines that are to be timed against one another start side by side and then answer in turn
(``--turn``), so that no start disturbs a measurement; going round several times (``--rounds``)
lets what a busy host adds fall on all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from vllm_b70.harness.client import Completion
from vllm_b70.harness.compare import compare
from vllm_b70.harness.prompts import default_lengths, make_prompts

PROMPTS, NEW_TOKENS, LONGEST = 128, 128, 2000
#: Prompts on which one user is timed.
SOLO = 8
#: What an engine needs where neither FlashAttention nor FlashInfer is installed.
STOCK = {
    "attention_backend": "TRITON_ATTN",
    "additional_config": {"gdn_prefill_backend": "triton"},
    "enable_prefix_caching": False,
}


def prompts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """The same prompts in every cell."""
    lengths = default_lengths(count, 0, longest=longest, block=min(528, longest - 1))
    return make_prompts(lengths, 0, (0, vocabulary))


def wait_for_turn(folder: Path, turn: str, limit: float = 400, rounds: int = 0) -> None:
    """Return when all engines are ready and those before this one are done.

    Args:
        folder: Where ``ready-N`` is made here, ``done-N`` by whoever started the cell, and
            ``done-N-R`` by an engine that has answered in round R.
        turn: "N/M": this is engine N of 1 to M.
        limit: Seconds after which it goes on: a measurement may then be disturbed, and says so.
        rounds: How often it has answered.
    """
    own, all_of_them = map(int, turn.split("/"))
    (folder / f"ready-{own}").touch()
    end = time.monotonic() + limit
    names = [[f"ready-{n}"] for n in range(1, all_of_them + 1)]
    names += [[f"done-{n}", f"done-{n}-{rounds}"] for n in range(1, own)]
    if rounds:
        names += [[f"done-{n}", f"done-{n}-{rounds - 1}"] for n in range(own, all_of_them + 1)]
    while missing := [
        either[0] for either in names if not any((folder / name).exists() for name in either)
    ]:
        if time.monotonic() > end:
            print(f"DISTURBED: not waiting any longer for {missing}", flush=True)
            return
        time.sleep(0.05)


def answer(
    engine: Any, asked: list[list[int]], users: int, new_tokens: int
) -> tuple[list[list[Any]], float]:
    """[tokens, logprobs] of each prompt, so many in flight at a time, and the seconds it took."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    waiting, answers = list(enumerate(asked)), {}
    begin, running = time.perf_counter(), 0
    while waiting or running:
        while waiting and running < users:
            index, tokens = waiting.pop(0)
            engine.add_request(str(index), TokensPrompt(prompt_token_ids=tokens), params)
            running += 1
        for output in engine.step():
            if output.finished:
                running -= 1
                done = output.outputs[0]
                logprobs = [
                    step[token].logprob
                    for step, token in zip(done.logprobs, done.token_ids, strict=True)
                ]
                answers[int(output.request_id)] = [list(done.token_ids), logprobs]
    seconds = time.perf_counter() - begin
    return [answers[index] for index in range(len(asked))], seconds


def accepted(engine: Any) -> tuple[float, float]:
    """Draft tokens proposed and accepted so far."""
    found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return (
        found.get("vllm:spec_decode_num_draft_tokens", 0),
        found.get("vllm:spec_decode_num_accepted_tokens", 0),
    )


def take_route(route: str) -> None:
    """Set the switches of a route, before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_B70"] = "0" if route == "stock" else "1"
    if route in ("native", "auto"):
        os.environ["VLLM_B70_LINEAR"] = route


def engine_options(route: str, depth: int, graphs: str = "on") -> dict[str, Any]:
    """What an engine of a route is given besides the model and its limits."""
    import torch

    options = dict(STOCK) if torch.cuda.is_available() else {"enable_prefix_caching": False}
    if depth:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": depth}
    if graphs == "off":
        # Compiled all the same: eager mode rounds elsewhere, which is another configuration.
        options["compilation_config"] = {"cudagraph_mode": "NONE"}
    elif route == "stock":
        options["compilation_config"] = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    return options


def run_cell(arguments: argparse.Namespace) -> None:
    """Start an engine and answer the prompts for each number of users."""
    if arguments.out.exists():
        print(f"{arguments.out.name} is there", flush=True)
        return
    take_route(arguments.route)
    from vllm import EngineArgs, LLMEngine

    begin = time.perf_counter()
    options = engine_options(arguments.route, arguments.depth, arguments.graphs)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(arguments.model),
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            kv_cache_memory_bytes=int(arguments.kv_gib * 2**30),
            # Checked against what is free at the start; other cells may run beside this one.
            gpu_memory_utilization=0.1,
            disable_log_stats=False,
            **options,
        )
    )
    config = json.loads((arguments.model / "config.json").read_text())
    vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
    if arguments.lengths:
        lengths = [int(length) for length in arguments.lengths.split(",")]
        asked = make_prompts(lengths, 0, (0, min(vocabulary, 10_000)))
    else:
        asked = prompts(arguments.prompts, arguments.longest, min(vocabulary, 10_000))
    started = time.perf_counter() - begin
    # Kernels are compiled at their first use, seconds each: a pass of each kind before the timing.
    all_users = [int(users) for users in arguments.users.split(",")]
    answer(engine, asked[:16], 1, 4)
    answer(engine, asked, max(all_users), arguments.new_tokens)
    levels: dict[int, dict[str, Any]] = {users: {"users": users} for users in all_users}
    rates: dict[int, list[float]] = {users: [] for users in all_users}
    prompt_seconds = []
    drafts = {users: [0.0, 0.0] for users in all_users}
    for turns in range(arguments.rounds):
        if arguments.turn:
            wait_for_turn(arguments.out.parent, arguments.turn, rounds=turns)
        prompt_seconds.append(answer(engine, asked, max(all_users), 1)[1])
        for users, level in levels.items():
            # One user is timed on a few prompts, and answers the others once.
            some = asked[: min(SOLO, arguments.solo or len(asked))] if users == 1 else asked
            before = accepted(engine)
            answers, seconds = answer(engine, some, users, arguments.new_tokens)
            rates[users].append(len(some) * arguments.new_tokens / seconds)
            if users == 1 and not turns:
                more = asked[len(some) : arguments.solo]
                answers += answer(engine, more, 1, arguments.new_tokens)[0]
            for i, (earlier, now) in enumerate(zip(before, accepted(engine), strict=True)):
                drafts[users][i] += now - earlier
            kept = level.setdefault("answers", answers)
            again = sum(a != b for a, b in zip(kept, answers, strict=False))
            level["differ_again"] = level.get("differ_again", 0) + again
        if arguments.turn:
            own = arguments.turn.split("/")[0]
            (arguments.out.parent / f"done-{own}-{turns}").touch()
    for users, level in levels.items():
        proposed, good = drafts[users]
        level["tokens_per_s"] = round(statistics.median(rates[users]), 1)
        level["all_tokens_per_s"] = [round(rate, 1) for rate in rates[users]]
        level["acceptance"] = good / proposed if proposed else None
        print(
            f"{arguments.out.stem} users {users}: {level['all_tokens_per_s']} tok/s, acceptance "
            f"{level['acceptance']}, {level['differ_again']} differ when asked again, engine "
            f"started in {started:.0f} s",
            flush=True,
        )
    from benchmarks.timing import head

    cell = {
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "route": arguments.route,
        "depth": arguments.depth,
        "graphs": arguments.graphs,
        "replica": arguments.replica,
        "started_s": round(started, 1),
        "prompts": [len(asked), max(map(len, asked)), arguments.new_tokens],
        "prompt_tokens_per_s": round(sum(map(len, asked)) / statistics.median(prompt_seconds), 1),
        **head(),
        "levels": list(levels.values()),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    partial = arguments.out.with_suffix(".partial")
    partial.write_text(json.dumps(cell))
    partial.rename(arguments.out)


def completions(level: dict[str, Any]) -> list[Completion]:
    """A level's answers as the comparison takes them."""
    return [
        Completion(tokens, logprobs, [], "length", 0, None, 0.0)
        for tokens, logprobs in level["answers"]
    ]


def collect(arguments: argparse.Namespace) -> None:
    """Compare every cell with the oracle of its route."""
    cells = [json.loads(path.read_text()) for path in sorted(arguments.cells.glob("*.json"))]
    if not cells:
        raise SystemExit(f"{arguments.cells} has no cells")

    def key(cell: dict[str, Any]) -> tuple[Any, ...]:
        return (cell["model"], cell["dtype"], cell["route"], *cell["prompts"])

    oracles = {
        key(cell): completions(level)
        for cell in cells
        for level in cell["levels"]
        if cell["depth"] == 0 and level["users"] == 1 and cell["graphs"] == "on"
        if not cell["replica"]
    }
    rows = []
    for cell in cells:
        for level in cell["levels"]:
            oracle = oracles.get(key(cell))
            row = {name: cell[name] for name in ("model", "dtype", "route", "depth", "graphs")}
            row["users"], row["answered"] = level["users"], len(level["answers"])
            row["replica"] = cell["replica"]
            row["oracle"] = not cell["replica"] and (
                (cell["depth"], level["users"], cell["graphs"]) == (0, 1, "on")
            )
            if oracle is not None and not row["oracle"]:
                # Either may have answered the first prompts only (--solo).
                count = min(len(oracle), len(level["answers"]))
                found = compare(oracle[:count], completions(level)[:count])
                row["sequences"] = count
                row["mismatches"] = found.mismatches
                row["logprob_mismatches"] = found.logprob_mismatches
            row |= {name: level[name] for name in ("acceptance", "tokens_per_s")}
            row |= {name: level.get(name) for name in ("all_tokens_per_s", "differ_again")}
            row["prompt_tokens_per_s"] = cell["prompt_tokens_per_s"]
            row["started_s"] = cell.get("started_s")
            row["distinct_tokens"] = len({t for tokens, _ in level["answers"] for t in tokens})
            rows.append(row)
            print(row, flush=True)
    first = cells[0]
    result = {
        "device": first["device"],
        "versions": first["versions"],
        "command": [cell["command"] for cell in cells],
        "baseline": "stock vLLM 0.32 with TRITON_ATTN, FLA's gated delta net, its own choice of "
        "mixed-precision kernel, FULL_DECODE_ONLY graphs; no FlashAttention, no FlashInfer",
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    moody = [row for row in rows if row["route"] != "stock" and row["differ_again"]]
    if moody:
        raise SystemExit(f"Error: {len(moody)} cells of ours differ when asked again")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    cell = commands.add_parser("cell")
    cell.add_argument("--model", type=Path, required=True)
    cell.add_argument("--dtype", default="bfloat16")
    cell.add_argument("--route", choices=["exact", "native", "auto", "stock"], default="exact")
    cell.add_argument("--depth", type=int, default=0)
    cell.add_argument("--graphs", choices=["on", "off"], default="on")
    cell.add_argument("--users", default="8,32,64,128")
    cell.add_argument("--prompts", type=int, default=PROMPTS)
    cell.add_argument("--longest", type=int, default=LONGEST)
    cell.add_argument("--lengths", help="of the prompts, instead of --prompts and --longest")
    cell.add_argument("--solo", type=int, help="prompts of one user, the first ones; default all")
    cell.add_argument("--turn", help="N/M: start beside M - 1 others, answer as number N")
    cell.add_argument("--rounds", type=int, default=1, help="how often it answers")
    cell.add_argument(
        "--replica", type=int, default=0, help="number of a server with its own caches"
    )
    cell.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    cell.add_argument("--max-model-len", type=int, default=2304)
    cell.add_argument("--max-num-seqs", type=int, default=128)
    cell.add_argument("--kv-gib", type=float, default=8.0, help="GiB of KV cache and state")
    cell.add_argument("--out", type=Path, required=True)
    together = commands.add_parser("collect")
    together.add_argument("cells", type=Path)
    together.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    {"cell": run_cell, "collect": collect}[arguments.command](arguments)


if __name__ == "__main__":
    main()
