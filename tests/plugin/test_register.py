"""With VLLM_B70=1 the plugin registers, or stops the process with one sentence."""

import os
import subprocess
import sys

import pytest

from vllm_b70.compat.versions import SUPPORTED, check_vllm_version
from vllm_b70.plugin import PluginError

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_B70")}


def load(body="", **environ):
    code = f"import vllm.plugins\n{body}\nvllm.plugins.load_general_plugins()\nprint('loaded')"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=CLEAN | {"VLLM_B70": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_it_registers_and_may_be_called_again():
    after = (
        "import vllm_b70.plugin as p, vllm.model_executor.custom_op as c\n"
        "from vllm.platforms import current_platform\n"
        "p.register(); p.register()\n"
        "print(type(current_platform).__name__, p.registered(), sorted(c.op_registry_oot))"
    )
    run = load(after)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "B70CpuPlatform True" in run.stdout and "QwenGatedDeltaNetAttention" in run.stdout
    assert run.stdout.strip().endswith("loaded")


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"VLLM_TARGET_DEVICE": "cpu"}, "VLLM_TARGET_DEVICE=cpu or a VLLM_PLUGINS list"),
        ({"VLLM_B70": "yes"}, "VLLM_B70='yes' is not allowed"),
        ({"VLLM_B70_LINEAR": "fast"}, "VLLM_B70_LINEAR='fast' is not allowed"),
        ({"VLLM_B70_LINAER": "exact"}, "VLLM_B70_LINAER is not a switch"),
    ],
)
def test_what_cannot_be_honoured_stops_the_process(environ, sentence):
    run = load(**environ)
    assert run.returncode != 0 and "loaded" not in run.stdout
    assert sentence in run.stderr.strip().splitlines()[-1]


def test_a_swallowed_exception_of_the_platform_plugin_is_not_silent():
    body = "import vllm_b70.plugin as p\np.platform = lambda: 1 / 0"
    run = load(body)
    assert run.returncode != 0
    assert "VLLM_B70=1 but vLLM runs on CpuPlatform" in run.stderr.strip().splitlines()[-1]


def test_a_seam_that_looks_different_is_named():
    body = (
        "from vllm.model_executor.layers.linear import UnquantizedLinearMethod as method\n"
        "method.apply = lambda self, layer, x, weight, bias=None: None"
    )
    run = load(body)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode != 0
    assert "UnquantizedLinearMethod.apply" in last and "install vLLM 0.32.x" in last


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
