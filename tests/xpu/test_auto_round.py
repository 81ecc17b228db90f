"""AutoRound checkpoints on an XPU end in our INT4 kernel, draft layers included."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from vllm_b70.checkpoints.tiny import make_tiny

HERE = Path(__file__).parent
#: What AutoRound calls the layers that it leaves in 16 bits.
PLAIN = [f"model.layers.{i}.linear_attn.in_proj_{p}" for i in range(3) for p in "ab"]


def relabel(folder, to, **changes):
    """The GPTQ checkpoint as AutoRound writes the same tensors."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    config = json.loads(file.read_text())
    given = config["quantization_config"]
    config["quantization_config"] = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": ["model.layers", "mtp.layers"],
        "extra_config": {name: {"bits": 16, "data_type": "fp"} for name in [*PLAIN, "mtp.fc"]},
        "data_type": "int",
        **{name: given[name] for name in ("bits", "group_size", "sym")},
    } | changes
    file.write_text(json.dumps(config))
    return to


@pytest.fixture(scope="module")
def results(tmp_path_factory, on_xpu):
    import socket

    folder = tmp_path_factory.mktemp("auto-round")
    gptq = folder / "gptq"
    make_tiny(gptq, format="gptq", shape="27b")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = [
        gptq,
        relabel(gptq, folder / "named"),
        relabel(gptq, folder / "all", block_name_to_quantize=None),
        relabel(gptq, folder / "lost", block_name_to_quantize=["model.layers"]),
        relabel(gptq, folder / "awq", packing_format="auto_round:auto_awq"),
    ]
    script = (HERE / "load.py").read_text()
    results, log = on_xpu(script, port, *folders, VLLM_B70="1", TRITON_INTERPRET="1")
    assert len(results) == len(folders), log[-3000:]
    return dict(zip([f.name for f in folders], results, strict=True))


@pytest.mark.parametrize("name", ["named", "all"])
def test_the_layers_are_those_of_the_gptq_checkpoint(results, name):
    want, got = results["gptq"], results[name]
    assert "error" not in want and "error" not in got, (want, got)
    assert got["quantization"] == "inc" and want["quantization"] == "auto_gptq"
    assert got["model"] == want["model"] and got["draft"] == want["draft"]
    assert want["model"]["model.layers.0.mlp.down_proj"][0] == "AutoGPTQLinearMethod"
    assert want["draft"]["model.layers.0.mlp.down_proj"][0] == "AutoGPTQLinearMethod"
    assert want["model"]["lm_head"][0] == "RowInvariantEmbeddingMethod"


def test_what_is_refused(results):
    assert 'add "mtp.layers" to it' in results["lost"]["error"]
    assert "packing_format is 'auto_round:auto_awq'" in results["awq"]["error"]


def test_the_patch_is_still_needed(on_xpu):
    """If this fails, vLLM asks the registry itself: remove compat/auto_round.py."""
    script = """
import json, types
from vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_scheme import INCWna16Scheme
layer = types.SimpleNamespace(bits=4, sym=True, group_size=128, is_gptq=True, is_awq=False,
                              backend="auto", packing_format="auto_round:auto_gptq")
method = INCWna16Scheme().get_linear_method(None, None, "layer", layer)
print("RESULT", json.dumps(type(method.scheme).__name__))
"""
    (scheme,), _ = on_xpu(script)
    assert scheme in ("INCXPULinearMethod", "INCARKLinearMethod")


def test_a_layer_of_another_kind_is_refused(on_xpu):
    script = """
import json, types
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_scheme import INCWna16Scheme
layer = types.SimpleNamespace(bits=2, sym=True, group_size=128, is_gptq=True, is_awq=False,
                              backend="auto", packing_format="auto_round:auto_gptq")
try:
    INCWna16Scheme().get_linear_method(None, None, "some.layer", layer)
except Exception as error:
    print("RESULT", json.dumps(str(error)))
"""
    (sentence,), _ = on_xpu(script, VLLM_B70="1")
    assert "the AutoRound layer some.layer (2 bits" in sentence
