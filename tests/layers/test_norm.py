"""Our norms under vLLM's names: registered on a GPU, and not all of them on the CPU."""

import subprocess
import sys

import pytest

SCRIPT = """
import vllm.model_executor.custom_op as custom_op
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm_b70.layers import norm
norm.{register}()
print(sorted(name for name in custom_op.op_registry_oot if "Norm" in name))
with set_current_vllm_config(VllmConfig()):
    plain, gemma = RMSNorm(64), GemmaRMSNorm(64)
print(type(plain).__name__, type(gemma).__name__)
"""
GPU = """['GemmaRMSNorm', 'RMSNorm', 'RMSNormGated']
RowInvariantRMSNorm RowInvariantGemmaRMSNorm
"""
CPU = """['RMSNormGated']
RMSNorm GemmaRMSNorm
"""


@pytest.mark.parametrize(("register", "expected"), [("register", CPU), ("register_gpu", GPU)])
def test_registered_names(register, expected):
    command = [sys.executable, "-c", SCRIPT.replace("{register}", register)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout == expected
