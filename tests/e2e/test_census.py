"""The census at the start of a real server: taken, then found again, and a control is stopped."""

import asyncio
import re

import pytest

from vllm_b70.checkpoints.tiny import make_tiny
from vllm_b70.harness.client import Client, ServerError
from vllm_b70.harness.compare import compare
from vllm_b70.harness.load import run_together
from vllm_b70.harness.oracle import run_alone
from vllm_b70.harness.prompts import make_prompts
from vllm_b70.harness.server import Server

pytestmark = pytest.mark.e2e

LINE = re.compile(r"census: (\d+) of (\d+) ops and shapes exact on .*, [\d.]+ s \((.*)\)")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("census") / "model"
    make_tiny(folder, format="ct", shape="9b")
    return folder


def serve(model, port, log, cache, **env):
    argv = ["vllm", "serve", str(model), "--port", str(port), "--served-model-name", "tiny"]
    argv += ["--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"]
    argv += ["--kv-cache-memory-bytes", "1G", "--enforce-eager"]
    argv += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
    env = {"VLLM_B70": "1", "VLLM_CACHE_ROOT": str(cache), "VLLM_LOGGING_LEVEL": "INFO"} | env
    return Server(argv, port=port, log_path=log, env=env)


def test_a_start_a_second_start_and_identity(model, tmp_path, free_port):
    prompts = make_prompts([5, 17, 64, 65, 130, 200, 31, 8], 5, (1, 1000))

    async def drive(url):
        async with Client(url, "tiny", timeout_s=300) as client:
            alone = await run_alone(client, prompts, 24)
            return alone, await run_together(client, prompts, 24, 8, 0)

    found = []
    for start in ("first", "second"):
        log = tmp_path / start
        with serve(model, free_port, log, tmp_path / "cache") as server:
            comparison = compare(*asyncio.run(drive(server.base_url)))
        assert comparison.mismatches == 0 and comparison.logprob_mismatches == 0
        lines = LINE.findall(log.read_text())
        assert len(lines) == 1, log.read_text()[-2000:]
        found += lines
    (exact, asked, kept), (again, asked_again, where) = found
    assert exact == asked == again == asked_again and int(asked) >= 11
    assert where == f"certified before, {kept}"


def test_a_control_is_stopped_with_one_sentence(model, tmp_path, free_port):
    log = tmp_path / "log"
    server = serve(model, free_port, log, tmp_path / "cache", VLLM_B70_LINEAR="naive")
    with pytest.raises(ServerError), server:
        pass
    sentence = re.search(r"CensusError: (VLLM_B70=1 cannot keep its promise.*)", log.read_text())
    assert sentence and "int4_linear" in sentence[1] and "rows" in sentence[1]
