"""Preemption and resumption give the same tokens, and really happen in this test."""

import asyncio

import pytest

from vllm_b70.checkpoints.tiny import make_tiny
from vllm_b70.harness.client import Client
from vllm_b70.harness.compare import compare
from vllm_b70.harness.load import run_together
from vllm_b70.harness.oracle import run_alone
from vllm_b70.harness.prompts import make_prompts
from vllm_b70.harness.server import Server
from vllm_b70.harness.steps import read_trace

pytestmark = pytest.mark.e2e

TOKENS = 70
# Just below the 256 tokens of a KV block, so that every request needs a second block while it
# generates, and there are too few of them.
LENGTHS = [206 + 2 * i for i in range(24)]


def test_preempted_requests_under_speculation(tmp_path, free_port):
    model, trace = tmp_path / "model", tmp_path / "trace.jsonl"
    make_tiny(model, format="ct", shape="9b")
    prompts = make_prompts(LENGTHS, 5, (1, 1000))
    argv = ["vllm", "serve", str(model), "--port", str(free_port), "--served-model-name", "tiny"]
    argv += ["--max-model-len", "512", "--max-num-seqs", "32", "--max-num-batched-tokens", "512"]
    argv += ["--kv-cache-memory-bytes", "1G", "--num-gpu-blocks-override", "66", "--enforce-eager"]
    argv += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
    env = {"VLLM_B70": "1", "VLLM_B70_STEP_TRACE": str(trace)}

    async def drive(url):
        async with Client(url, "tiny", timeout_s=600) as client:
            alone = await run_alone(client, prompts, TOKENS)
            return alone, await run_together(client, prompts, TOKENS, 24, 0)

    with Server(argv, port=free_port, log_path=tmp_path / "log", env=env) as server:
        alone, together = asyncio.run(drive(server.base_url))
    comparison = compare(alone, together)
    assert comparison.mismatches == 0, comparison.divergences[0]
    assert comparison.logprob_mismatches == 0
    steps = read_trace(trace)
    assert steps.preempted > 0, "nothing was preempted: the test shows nothing"
    assert any(width > 4 for width in steps.widths), "no replay of a resumed request was seen"
    assert steps.cuts > 0, "the grid moved no chunk end"
