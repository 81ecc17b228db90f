"""The engine of test_graphs: depths by batch size, all of it captured; its graphs are verified at
start, once more for the time it takes, and with faults planted in them. Prints one JSON line."""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "VLLM_B70": "1",
    # Shown by test_census.
    "VLLM_B70_CENSUS": "off",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
}

import torch

from tests.graphs.plants import SEEN_IN, plants


def main(folder):
    from vllm_b70.checkpoints.tiny import make_tiny

    make_tiny(folder, format="ct", shape="9b")
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**28,
            gpu_memory_utilization=0.2,
            speculative_config={
                "method": "mtp",
                "num_speculative_tokens": 3,
                "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1]],
            },
        )
    )
    from vllm_b70.graphs import steps
    from vllm_b70.graphs.verify import GraphError, enforce, verify
    from vllm_b70.graphs.worker import verify_runner

    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def answers():
        """Eight prompts, so many at a time: the widths change as requests come and go."""
        tokens = {}
        for i in range(8):
            prompt = [(37 * i + 11 * j) % 1000 for j in range(5 + 9 * i)]
            engine.add_request(
                str(i),
                TokensPrompt(prompt_token_ids=prompt),
                SamplingParams(
                    temperature=0, max_tokens=16 + 4 * i, ignore_eos=True, detokenize=False
                ),
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        # The runner hears in the step after that a request is done, and has room for eight only.
        core = engine.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            engine.step()
        return [tokens[str(i)] for i in range(8)]

    def names(found):
        return sorted(f"{d.run}: {d.part.whose}'s {d.part.what}" for d in found)

    target, prefill, decode = steps.captured(runner)
    result = {
        "shapes": sorted((key.num_reqs, key.uniform_token_count) for key in target),
        "drafter": [len(prefill), len(decode)],
        "found": {},
        "expected": SEEN_IN,
    }
    result["answers"] = answers()
    begin = time.perf_counter()
    with torch.inference_mode():  # as at the start
        verify_runner(runner)
    torch.cuda.synchronize()
    result["seconds"] = time.perf_counter() - begin
    with torch.inference_mode():
        rig = steps.Steps(runner, 4)
        run, other = (steps.StepRun(rig, steps.Case(*c)) for c in ((2, 4, 3), (4, 2, 1)))
        result["found"]["none"] = names(verify([run, other]))
        # Other inputs for each: a buffer that nobody fills holds those of the step before.
        for seed, (name, plant) in enumerate(plants(runner, 2, 4).items()):
            with plant():
                runs = [run, other] if name in ("ulp", "draft") else [run]
                found = verify(runs, seeds=(2 * seed + 2,))
            result["found"][name] = names(found)
            if name == "ulp":
                try:
                    enforce(found)
                except GraphError as error:
                    result["sentence"] = str(error)
        rig.close()
    # What was verified, and what was planted, is gone.
    result["answers again"] = answers()
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
