"""With VLLM_B70 unset vLLM is as if the plugin were not installed."""

import os
import subprocess
import sys

import pytest

from vllm_b70.checkpoints.tiny import make_tiny

pytestmark = pytest.mark.e2e

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_B70")}
PLAIN = """
import sys
from vllm import LLM, SamplingParams, TokensPrompt
if __name__ == "__main__":
    llm = LLM(sys.argv[1], max_model_len=256, enforce_eager=True, enable_prefix_caching=False,
              kv_cache_memory_bytes=2**28, disable_log_stats=True)
    prompts = [TokensPrompt(prompt_token_ids=[i + 1, 7, 99]) for i in range(4)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    print("TOKENS", [o.outputs[0].token_ids for o in outputs])
"""


def both(*command, **environ):
    """The same command with the plugin installed but off, and with no plugin let in."""
    return [
        subprocess.run(
            command,
            env=CLEAN | {"VLLM_LOGGING_LEVEL": "WARNING"} | extra | environ,
            capture_output=True,
            text=True,
            timeout=600,
        )
        for extra in ({}, {"VLLM_PLUGINS": ""})
    ]


def test_the_help_text():
    off, absent = both("vllm", "--help")
    assert off.returncode == absent.returncode == 0
    assert off.stdout == absent.stdout and "serve" in off.stdout
    assert "vllm_b70" not in off.stdout + off.stderr


def test_a_plain_model_on_the_cpu(tmp_path):
    make_tiny(tmp_path / "model", format="bf16", shape="9b")
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    runs = both(sys.executable, str(script), str(tmp_path / "model"))
    tokens = [
        [line for line in run.stdout.splitlines() if line.startswith("TOKENS")] for run in runs
    ]
    assert tokens[0] and tokens[0] == tokens[1], runs[0].stderr[-2000:]
    assert "vllm_b70" not in runs[0].stdout + runs[0].stderr
