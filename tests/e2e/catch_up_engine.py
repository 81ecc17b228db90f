"""The engine of test_catch_up. The same two requests with the draft layer skipped, not skipped, and
skipped without catching up; then, on a CPU, more requests than there is room for. Prints one JSON
line."""

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

CUDA = torch.cuda.is_available()
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
            enforce_eager=not CUDA,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**28,
            # Checked against what is free at the start; others may use the device.
            gpu_memory_utilization=0.2 if CUDA else 0.92,
            num_gpu_blocks_override=None if CUDA else BLOCKS,
            disable_log_stats=False,
            speculative_config={
                "method": "mtp",
                "num_speculative_tokens": 3,
                "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 64, 0]],
            },
        )
    )
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = runner.speculator if CUDA else runner.drafter
    decide, replay = drafter._lag.step, drafter._replay
    (layer,) = drafter.draft_attn_layer_names if CUDA else drafter._draft_attn_layer_names
    cache = engine.vllm_config.compilation_config.static_forward_context[layer].kv_cache
    draws = random.Random(5)
    prompts = [[draws.randrange(1, 1000) for _ in range(PROMPT)] for _ in range(2)]

    def counters():
        found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
        return [found[f"vllm:spec_decode_num_{name}_tokens"] for name in ("accepted", "draft")]

    def preemptions():
        return sum(m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions")

    def drafted():
        """The drafts that a request alone has got, and its first block: it has no more yet."""
        if CUDA:
            slots = list(runner.req_states.req_id_to_index.values())
            made = runner.req_states.draft_tokens[slots].tolist()
            if len(slots) != 1 or made[0][0] < 1:
                return None
            table = runner.block_tables.block_tables[drafter._draft_group()].gpu[slots]
            return made, cache[table[0, 0]].clone()
        made = runner._draft_token_ids
        if not torch.is_tensor(made) or not made.shape[1]:
            return None
        table = runner.input_batch.block_table[drafter.kv_cache_gid].block_table.cpu
        return made.tolist(), cache[table[0, 0]].clone()

    def run(mode, company=COMPANY):
        skips, replays = [], []

        def deciding(requests, widths, inside, depth):
            step = decide(requests, widths, inside, depth)
            skips.append(step.skip)
            return DraftStep(False, [0] * len(requests), step.begun) if mode == "never" else step

        def replaying(*arguments):
            replays.append(int(sum(arguments[1 if CUDA else 0])))
            if mode != "missing":
                replay(*arguments)

        drafter._lag.step, drafter._replay = deciding, replaying
        cache.zero_()
        before, first, tokens = counters(), None, {}
        for name, prompt, length in zip("ab", prompts, (TOKENS, company), strict=True):
            engine.add_request(
                name + mode,
                TokensPrompt(prompt_token_ids=prompt),
                SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False),
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id[0]] = output.outputs[0].token_ids
            if first is None:
                first = drafted()
        accepted, proposed = (b - a for a, b in zip(before, counters(), strict=True))
        return {
            "tokens": list(tokens["a"]),
            "drafts": first and first[0],
            "block": first and first[1].float(),
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
        greedy = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, detokenize=False)
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
    reference = runs["never"]["block"]
    for found in runs.values():
        block = found.pop("block")
        if block is not None:
            off = (block - reference).abs().max() / reference.abs().max()
            found["cache_is_off_by"] = off.item()
    drafter._lag.step, drafter._replay = decide, replay
    if not CUDA:
        before = preemptions()
        runs["alone"] = crowd(1)
        runs["alone"]["preempted"] = preemptions() - before
        runs["crowd"] = crowd(len(CROWD))
        runs["crowd"]["preempted"] = preemptions() - before
    from prometheus_client import REGISTRY

    shown = ("depth", "why", "position")
    runs["counts"] = {
        "|".join(
            [sample.name, *(sample.labels[n] for n in shown if n in sample.labels)]
        ): sample.value
        for metric in REGISTRY.collect()
        if metric.name.startswith("vllm_b70:")
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    print("RESULT", json.dumps(runs), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
