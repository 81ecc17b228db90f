"""A server whose 16-bit linears are the vendor's, in certified row classes, with company."""

import asyncio
import re

import pytest

from vllm_b70.checkpoints.tiny import make_tiny
from vllm_b70.harness.client import Client
from vllm_b70.harness.compare import compare
from vllm_b70.harness.load import run_together
from vllm_b70.harness.oracle import run_alone
from vllm_b70.harness.prompts import make_prompts
from vllm_b70.harness.server import Server

pytestmark = pytest.mark.e2e

LINE = re.compile(r"linears: (\d+) of (\d+) shapes native, digest (\w{16})")


def test_solo_and_company_agree(tmp_path, free_port):
    make_tiny(tmp_path / "model", format="ct", shape="9b")
    prompts = make_prompts([5, 17, 64, 65, 130, 200, 31, 8], 5, (1, 1000))
    argv = ["vllm", "serve", str(tmp_path / "model"), "--port", str(free_port)]
    argv += ["--served-model-name", "tiny", "--max-model-len", "512", "--max-num-seqs", "8"]
    argv += ["--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "256M"]
    argv += ["--enforce-eager"]
    argv += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
    env = {
        "VLLM_B70": "1", "VLLM_B70_LINEAR": "native", "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        # One thread: two of them wait for one another wherever the machine is busy.
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip

    async def drive(url):
        async with Client(url, "tiny", timeout_s=300) as client:
            alone = await run_alone(client, prompts, 16)
            return alone, await run_together(client, prompts, 16, 8, 0)

    with Server(argv, port=free_port, log_path=tmp_path / "log", env=env) as server:
        comparison = compare(*asyncio.run(drive(server.base_url)))
    log = (tmp_path / "log").read_text()
    assert comparison.mismatches == 0 and comparison.logprob_mismatches == 0
    ((native, shapes, _),) = LINE.findall(log)
    assert native == shapes and int(shapes) >= 5, log[-2000:]
    exact, asked = re.search(r"census: (\d+) of (\d+) ops and shapes exact", log).groups()
    assert exact == asked
