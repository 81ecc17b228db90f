"""Where a step's time goes on a GPU: decodes, and steps that hold prompts too, at many users.

    python benchmarks/profile_steps.py DIR/wide-9b exact.txt
    python benchmarks/profile_steps.py DIR/wide-9b stock.txt --route stock

For both kinds of step: the wall time, the kernels' time by name, and the host's time by function.
Two of these that are to be compared run side by side with ``--turn 1/2`` and ``--turn 2/2`` and
answer in turn; files ``ready-N`` and ``done-N`` stand beside the output (``exact_gpu.py``).
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.exact_gpu import engine_options, take_route, wait_for_turn

PROMPT, TOKENS = 600, 400
#: Steps until the first prompts are done, steps with prompts that are measured, and decodes.
WARM, MIXED, DECODES = 6, 6, 60
TOP = 40


class Engine:
    """An engine of vLLM and what is asked of it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        take_route(arguments.route)
        from vllm import EngineArgs, LLMEngine

        self.users = arguments.users
        self.made = 0
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(arguments.model),
                max_model_len=2304,
                max_num_seqs=self.users,
                kv_cache_memory_bytes=int(arguments.kv_gib * 2**30),
                gpu_memory_utilization=0.1,
                **engine_options(arguments.route, arguments.depth),
            )
        )

    def fill(self) -> None:
        """Add a prompt for each user."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        greedy = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False
        )
        for user in range(self.users):
            prompt = [1 + (37 * user + 11 * i) % 997 for i in range(PROMPT)]
            self.engine.add_request(
                f"{self.made}-{user}", TokensPrompt(prompt_token_ids=prompt), greedy
            )
        self.made += 1

    def drain(self) -> None:
        """Give up what is running."""
        running = list(self.engine.output_processor.request_states)
        self.engine.abort_request(running, internal=True)  # vLLM's own ids, not ours
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def steps(self, count: int) -> list[float]:
        """Run steps; ms of each, the device waited for at the end."""
        import torch

        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.engine.step()
            times.append(1e3 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
        return times


def measure(engine: Engine, name: str, before: int, count: int, say: Any) -> None:
    """Time, then profile on the device, then on the host, ``count`` steps after ``before``."""
    import torch

    for kind in ("wall", "device", "host"):
        engine.fill()
        engine.steps(before)
        if kind == "wall":
            begin = time.perf_counter()
            times = engine.steps(count)
            mean = 1e3 * (time.perf_counter() - begin) / count
            say(f"{name}: {mean:.2f} ms a step, median {statistics.median(times):.2f}")
        elif kind == "device":
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profiler:
                engine.steps(count)
            found = sorted(
                (
                    (event.self_device_time_total, event.count, event.key)
                    for event in profiler.key_averages()
                    if event.self_device_time_total
                ),
                reverse=True,
            )
            total, kernels = sum(f[0] for f in found), sum(f[1] for f in found)
            say(f"{name}: {total / count / 1e3:.3f} ms of {kernels / count:.0f} kernels a step")
            for microseconds, calls, key in found[:TOP]:
                say(f"  {microseconds / count:.1f} us in {calls / count:.1f} of {key[:90]}")
        else:
            profile = cProfile.Profile()
            profile.runcall(engine.steps, count)
            for order in ("tottime", "cumtime"):
                text = io.StringIO()
                pstats.Stats(profile, stream=text).sort_stats(order).print_stats(TOP)
                say("\n".join(line[:150] for line in text.getvalue().splitlines()[4:]))
        engine.drain()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--route", choices=["exact", "stock"], default="exact")
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--kv-gib", type=float, default=5.0)
    parser.add_argument("--turn", help="N/M: start beside M - 1 others, measure as number N")
    arguments = parser.parse_args()
    engine = Engine(arguments)
    engine.fill()
    engine.steps(4 * WARM)
    engine.drain()
    if arguments.turn:
        wait_for_turn(arguments.out.parent, arguments.turn)
    with arguments.out.open("w") as file:

        def say(line: str) -> None:
            print(line, file=file, flush=True)

        measure(engine, "with prompts", WARM, MIXED, say)
        # All prompts are read after so many steps of vLLM's default budget for this entry point.
        measure(engine, "decodes", 2 + engine.users * PROMPT // 1900, DECODES, say)


if __name__ == "__main__":
    main()
