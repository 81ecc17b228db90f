"""With VLLM_B70=1 the plugin registers, or stops the process with one sentence."""

import json
import os
import subprocess
import sys

import pytest

from vllm_b70.compat.versions import SUPPORTED, check_vllm_version
from vllm_b70.plugin import PluginError

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_B70")}


AFTER = """
import vllm_b70.plugin as p, vllm.model_executor.custom_op as c
from vllm.platforms import current_platform
p.register(); p.register()
print(type(current_platform).__name__, p.registered(), sorted(c.op_registry_oot))
from vllm.model_executor.models.registry import ModelRegistry
print("DRAFT", ModelRegistry.models["Qwen3_5MTP"].module_name)
"""
ONLY_THE_PLATFORM = """
from vllm.platforms import current_platform
current_platform.check_and_update_config(None)
"""
SWALLOWED = "import vllm_b70.plugin as p\np.platform = lambda: 1 / 0"
ANOTHER_SEAM = """
from vllm.model_executor.layers.linear import UnquantizedLinearMethod as method
method.apply = lambda self, layer, x, weight, bias=None: None
"""
#: Name: environment, code before the plugins are loaded, code after it.
CASES = {
    "plain": ({}, "", AFTER),
    "target device": ({"VLLM_TARGET_DEVICE": "cpu"}, "", ""),
    "malformed switch": ({"VLLM_B70": "yes"}, "", ""),
    "malformed choice": ({"VLLM_B70_LINEAR": "fast"}, "", ""),
    "unknown switch": ({"VLLM_B70_LINAER": "triton"}, "", ""),
    "swallowed exception": ({}, SWALLOWED, ""),
    "another seam": ({}, ANOTHER_SEAM, ""),
    "general plugin kept out": ({}, ONLY_THE_PLATFORM, ""),
    "own draft model": ({"VLLM_B70_DRAFT_HEAD": "none"}, "", AFTER),
    "off": ({"VLLM_B70": "0", "VLLM_B70_STEP_TRACE": "/nonexistent/t"}, "", ""),
}
# A fork a case: importing vLLM is what takes the time.
SCRIPT = """
import json, os, sys
import vllm.plugins
for name, (environ, before, after) in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    if os.fork() == 0:
        os.environ.update(environ)
        try:
            exec(before)
            vllm.plugins.load_general_plugins()
            exec(after)
            result = "loaded"
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        print("RESULT", json.dumps([name, result]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def results():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CASES)],
        env=CLEAN | {"VLLM_B70": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [line[7:] for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(CASES), run.stderr[-3000:]
    return dict(map(json.loads, lines)) | {"output": run.stdout}


def test_it_registers_and_may_be_called_again(results):
    assert results["plain"] == "loaded"
    assert "B70CpuPlatform True" in results["output"]
    assert "QwenGatedDeltaNetAttention" in results["output"]


def test_the_draft_model_is_ours_where_a_switch_asks_for_it(results):
    assert results["own draft model"] == "loaded"
    names = [line.split()[1] for line in results["output"].splitlines() if line[:5] == "DRAFT"]
    stock = "vllm.model_executor.models.qwen3_5_mtp"
    assert names == ["vllm_b70.layers.draft_model", stock]


def test_off_reads_no_other_switch(results):
    assert results["off"] == "loaded"


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("target device", "VLLM_TARGET_DEVICE=cpu or a VLLM_PLUGINS list"),
        ("malformed switch", "VLLM_B70='yes' is not allowed"),
        ("malformed choice", "VLLM_B70_LINEAR='fast' is not allowed"),
        ("unknown switch", "VLLM_B70_LINAER is not a switch"),
        ("swallowed exception", "VLLM_B70=1 but vLLM runs on CpuPlatform"),
        ("another seam", "UnquantizedLinearMethod.apply"),
        ("general plugin kept out", "let VLLM_PLUGINS include vllm_b70"),
        ("another seam", "install vLLM 0.32.x"),
    ],
)
def test_what_cannot_be_honoured_stops_the_process_in_one_sentence(results, case, sentence):
    assert sentence in results[case] and "\n" not in results[case]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1", "0.32"])
def test_supported_versions(version):
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.0", "0.3.2"])
def test_other_versions_are_refused_with_the_range(version):
    with pytest.raises(PluginError) as error:
        check_vllm_version(version)
    assert version in str(error.value) and "0.32.x" in str(error.value)


def test_the_supported_range_is_what_the_documents_say():
    assert SUPPORTED == ("0.32",)
