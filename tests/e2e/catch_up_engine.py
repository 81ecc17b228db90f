"""The engine of test_catch_up. The same two requests with the draft layer skipped, not skipped, and
skipped without catching up; then more requests than there is room for. Prints one JSON line."""

import json
import os
import random
import sys
from pathlib import Path

os.environ |= {
    "VLLM_B70": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
from safetensors.torch import load_file, save_file

PROMPT, COMPANY, TOKENS = 9, 60, 100
#: Just below the 256 tokens of a KV block: all these need a second one at about the same time.
CROWD = [240 + 2 * i for i in range(8)]
#: As many blocks as admit them: attention and two groups of state each, three more slots for the
#: first, and what admission leaves free.
BLOCKS = 1 + 3 * len(CROWD) + 6 + 6


def make_attentive(folder):
    """A checkpoint whose next token depends on far ones through one attention layer, which the MTP
    head copies: its drafts are right if its own KV cache is."""
    from vllm_b70.checkpoints.tiny import make_tiny

    make_tiny(folder, format="bf16", shape="9b")
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    (last,) = {
        name.split(".")[2] for name in weights if name.endswith("self_attn.q_proj.weight")
    } - {"0"}
    layer = f"model.layers.{last}."
    for name, weight in weights.items():
        target = name.startswith("model.layers.") and not name.startswith(layer)
        if target and name.split(".")[-2] in ("out_proj", "o_proj", "down_proj"):
            weight.zero_()
    weights[layer + "self_attn.q_norm.weight"] += 2
    weights[layer + "self_attn.o_proj.weight"] *= 2
    for name in [name for name in weights if name.startswith("mtp.layers.0.")]:
        weights[name] = weights[name.replace("mtp.layers.0.", layer)].clone()
    identity = torch.eye(weights["mtp.norm.weight"].shape[0])
    weights["mtp.fc.weight"] = torch.cat([identity, 0 * identity], 1).bfloat16()
    weights["mtp.norm.weight"] = weights["model.norm.weight"].clone()
    weights["mtp.pre_fc_norm_embedding.weight"].zero_()
    save_file(weights, path, metadata={"format": "pt"})


def main(folder):
    make_attentive(folder)
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.inputs import TokensPrompt

    from vllm_b70.speculation.draft_lag import DraftStep

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            max_model_len=512,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**28,
            num_gpu_blocks_override=BLOCKS,
            disable_log_stats=False,
            speculative_config={
                "method": "mtp",
                "num_speculative_tokens": 3,
                "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 64, 0]],
            },
        )
    )
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = runner.drafter
    decide, replay = drafter._lag.step, drafter._replay
    (layer,) = drafter._draft_attn_layer_names
    cache = engine.vllm_config.compilation_config.static_forward_context[layer].kv_cache
    draws = random.Random(5)
    prompts = [[draws.randrange(1, 1000) for _ in range(PROMPT)] for _ in range(2)]

    def counters():
        found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
        return [found[f"vllm:spec_decode_num_{name}_tokens"] for name in ("accepted", "draft")]

    def preemptions():
        return sum(m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions")

    def run(mode, company=COMPANY):
        skips, replays = [], []

        def deciding(requests, widths, inside, depth):
            step = decide(requests, widths, inside, depth)
            skips.append(step.skip)
            return DraftStep(False, [0] * len(requests), step.begun) if mode == "never" else step

        def replaying(counts, *rest):
            replays.append(sum(counts))
            if mode != "missing":
                replay(counts, *rest)

        drafter._lag.step, drafter._replay = deciding, replaying
        cache.zero_()
        before, blocks, drafts, tokens = counters(), None, None, {}
        for name, prompt, length in zip("ab", prompts, (TOKENS, company), strict=True):
            engine.add_request(
                name + mode,
                TokensPrompt(prompt_token_ids=prompt),
                SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False),
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id[0]] = output.outputs[0].token_ids
            made = runner._draft_token_ids
            if blocks is None and torch.is_tensor(made) and made.shape[1]:
                # The first step that drafts; all of the request's positions are in its first block.
                table = runner.input_batch.block_table[drafter.kv_cache_gid].block_table.cpu
                blocks, drafts = cache[table[0, 0]].clone(), made.tolist()
        accepted, proposed = (b - a for a, b in zip(before, counters(), strict=True))
        return {
            "tokens": list(tokens["a"]),
            "blocks": blocks,
            "drafts": drafts,
            "acceptance": accepted / proposed if proposed else None,
            "skipped": sum(skips),
            "replayed": sum(replays),
        }

    scheduler = engine.engine_core.engine_core.scheduler

    def crowd(users):
        """The crowd's tokens, so many in flight, and the most requests that held state slots, with
        how many of a group."""
        waiting = [
            (f"{i}-{users}", [draws.randrange(1, 1000) for _ in range(length)])
            for draws in [random.Random(7)]
            for i, length in enumerate(CROWD)
        ]
        tokens, held = {}, (0, 0)
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < users:
                name, prompt = waiting.pop(0)
                engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), greedy)
            for output in engine.step():
                tokens[output.request_id.split("-")[0]] = output.outputs[0].token_ids
            slots = [len(held) for held in scheduler._states[0].req_to_blocks.values()]
            held = max(held, (len(slots), sum(slots)))
        return {"tokens": tokens, "held": held, "groups": len(scheduler._states)}

    runs = {mode: run(mode) for mode in ("never", "skipped", "missing")}
    runs["no drafts"] = run("no drafts", company=TOKENS + 1)
    reference = runs["never"]["blocks"]
    for found in runs.values():
        blocks = found.pop("blocks")
        found["same_cache"] = blocks is not None and torch.equal(blocks, reference)
    drafter._lag.step, drafter._replay = decide, replay
    before = preemptions()
    runs["alone"] = crowd(1)
    runs["alone"]["preempted"] = preemptions() - before
    runs["crowd"] = crowd(len(CROWD))
    runs["crowd"]["preempted"] = preemptions() - before
    from prometheus_client import REGISTRY

    runs["counts"] = {
        "|".join(
            [
                sample.name,
                *(
                    sample.labels[name]
                    for name in ("depth", "why", "position")
                    if name in sample.labels
                ),
            ]
        ): sample.value
        for metric in REGISTRY.collect()
        if metric.name.startswith("vllm_b70:")
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    print("RESULT", json.dumps(runs), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
