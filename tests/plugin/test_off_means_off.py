"""With VLLM_B70 unset the plugin does nothing, imports nothing heavy and prints nothing."""

import os
import subprocess
import sys

import pytest

from vllm_b70.settings import SWITCHES

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_B70")}


def python(*arguments, **environ):
    return subprocess.run(
        [sys.executable, *arguments],
        env=CLEAN | environ,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("call", ["register", "platform"])
def test_importtime_of_the_entry_points(call):
    run = python("-X", "importtime", "-c", f"from vllm_b70 import plugin; plugin.{call}()")
    assert run.returncode == 0 and run.stdout == ""
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert {"vllm_b70", "vllm_b70.plugin", "vllm_b70.settings"} <= imported
    ours = {name for name in imported if name.startswith("vllm_b70")}
    assert ours == {"vllm_b70", "vllm_b70.plugin", "vllm_b70.settings"}
    heavy = {"torch", "triton", "vllm", "numba", "numpy"}
    assert not {name.partition(".")[0] for name in imported} & heavy
    third_party = {line for line in run.stderr.splitlines() if not line.startswith("import time:")}
    assert not third_party, "nothing is printed"


ATTRIBUTES = """
import vllm.envs, vllm.plugins
from vllm.platforms import current_platform
import vllm.model_executor.custom_op as custom_op
import vllm.model_executor.kernels.linear as kernels
import vllm.model_executor.layers.linear as linear
import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn as gdn
import vllm.v1.attention.backends.cpu_attn as attention
import vllm.v1.attention.backends.gdn_attn as gdn_attention
import vllm.v1.core.sched.scheduler as scheduler
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.layernorm import RMSNormGated
import os

def look():
    owners = [linear.ColumnParallelLinear, linear.UnquantizedLinearMethod, scheduler.Scheduler,
              gdn.QwenGatedDeltaNetAttention, attention.CPUAttentionBackend,
              gdn_attention.GDNAttentionMetadataBuilder, EngineArgs, RMSNormGated,
              type(current_platform)]
    seen = {(o.__qualname__, n): id(v) for o in owners for n, v in vars(o).items()}
    seen["oot"] = tuple(custom_op.op_registry_oot)
    seen["kernels"] = tuple(k.__name__ for ks in kernels._POSSIBLE_KERNELS.values() for k in ks)
    seen["environ"] = tuple(sorted(os.environ.items()))
    return seen, frozenset(vllm.envs.environment_variables)

before, names = look()
vllm.plugins.load_general_plugins()
after, names_after = look()
print(type(current_platform).__module__, before == after, sorted(names_after - names))
"""


def test_switched_on_the_same_look_sees_the_difference():
    run = python("-c", ATTRIBUTES, VLLM_B70="1")
    assert run.returncode == 0, run.stderr[-2000:]
    assert "vllm_b70.platform False" in run.stdout


@pytest.mark.parametrize("value", [None, "0"])
def test_vllm_is_left_as_it_was(value):
    environ = {} if value is None else {"VLLM_B70": value}
    run = python("-c", ATTRIBUTES, **environ)
    assert run.returncode == 0, run.stderr[-2000:]
    *_, last = run.stdout.strip().splitlines()
    module, same, names = last.split(" ", 2)
    assert module == "vllm.platforms.cpu" and same == "True"
    expected = [] if value is None else sorted(SWITCHES)
    assert names == str(expected)
    assert "vllm_b70" not in run.stderr
