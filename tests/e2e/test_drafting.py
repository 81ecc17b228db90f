"""Every way to draft gives the tokens of no speculation, and really drafts in this test."""

import asyncio

import pytest
from tokenizers import Tokenizer

from vllm_b70.checkpoints.tiny import make_tiny
from vllm_b70.harness.client import Client
from vllm_b70.harness.compare import compare
from vllm_b70.harness.load import run_together
from vllm_b70.harness.metrics import parse_speculation
from vllm_b70.harness.oracle import run_alone
from vllm_b70.harness.prompts import make_prompts
from vllm_b70.harness.server import Server
from vllm_b70.speculation import shortlist

pytestmark = pytest.mark.e2e

TOKENS = 40
MTP = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']


def test_a_quantised_draft_with_a_shortlist_changes_no_token(tmp_path, free_port):
    model, listed = tmp_path / "model", tmp_path / "list"
    make_tiny(model, format="ct", shape="9b")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = sorted({*range(0, 1024, 3), *range(1, 1024, 3), *shortlist.special_ids(tokenizer)})
    shortlist.write(listed, tokenizer, ids)
    prompts = make_prompts([1, 3, 17, 33, 64, 65, 100, 130], 5, (1, 1000))
    argv = ["vllm", "serve", str(model), "--port", str(free_port), "--served-model-name", "tiny"]
    argv += ["--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
    argv += ["--kv-cache-memory-bytes", "256M", "--enforce-eager"]
    env = {
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_B70": "1",
        "VLLM_B70_DRAFT_LAYER": "int4",
        "VLLM_B70_DRAFT_SHORTLIST": str(listed),
    }

    def serve(arguments, drive):
        async def run():
            async with Client(server.base_url, "tiny", timeout_s=600) as client:
                return await drive(client), await client.metrics()

        with Server(argv + arguments, port=free_port, log_path=tmp_path / "log", env=env) as server:
            return asyncio.run(run())

    # The switches have nothing to act on without speculation, and say so.
    oracle, _ = serve([], lambda client: run_alone(client, prompts, TOKENS))
    assert "have nothing to act on" in (tmp_path / "log").read_text()
    got, metrics = serve(MTP, lambda client: run_together(client, prompts, TOKENS, 8, 0))
    comparison = compare(oracle, got)
    assert comparison.mismatches == 0, comparison.divergences[0]
    assert comparison.logprob_mismatches == 0
    log = (tmp_path / "log").read_text()
    assert f"4-bit draft head of {len(ids)} tokens" in log
    assert "quantises 5 linears of the MTP layer; 0 are in 4 bit" in log
    speculation = parse_speculation(metrics)
    assert 0 < speculation.accepted_tokens < speculation.draft_tokens
    assert any(token not in ids for answer in got for token in answer.token_ids)
