"""Every kind of unusable checkpoint, made by damaging a tiny one."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_b70.checkpoints.check import check_checkpoint, is_complete
from vllm_b70.checkpoints.errors import CheckpointError
from vllm_b70.checkpoints.pack import pack_compressed_tensors, quantize
from vllm_b70.checkpoints.tiny import int4_modules, make_tiny

MODULE = "model.layers.0.mlp.down_proj"
"""Present in both fixtures: N = 256, K = 512, group 32."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    make_tiny(root / "ct", format="ct", shape="9b")
    make_tiny(root / "gptq", format="gptq", shape="9b")
    make_tiny(root / "bf16", format="bf16", shape="9b")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def ct(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["ct"], tmp_path / "ct"))


@pytest.fixture
def gptq(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["gptq"], tmp_path / "gptq"))


@pytest.fixture
def bf16(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["bf16"], tmp_path / "bf16"))


def edit_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply ``change`` to the quantization_config."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def edit_weights(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply ``change`` to the weights entry of the only config group."""
    edit_config(path, lambda config: change(config["config_groups"]["group_0"]["weights"]))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refused(path: Path, *fragments: str) -> None:
    """The check raises one sentence that holds every fragment and says what to do."""
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(path)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, message
    assert message.endswith(".") and ";" in message and "\n" not in message, message
    assert not re.search(r"[a-z]\. [A-Z]", message), message


def test_undamaged_checkpoints_pass(originals: dict[str, Path]) -> None:
    for path in originals.values():
        check_checkpoint(path)


def test_published_form_passes(tmp_path: Path) -> None:
    """Wrapper form, group 128, MTP tensors in a file of their own, an index beside them."""
    path = tmp_path / "model"
    make_tiny(path, format="ct", shape="9b", conditional=True, group_size=128)
    tensors = load_file(path / "model.safetensors")
    main = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    save_file(main, path / "model.safetensors")
    save_file(mtp, path / "model_mtp.safetensors")
    (path / "model.safetensors.index.json").write_text("{}")
    check_checkpoint(path)
    # the same tensor in two files
    save_file(tensors, path / "model.safetensors")
    refused(path, "is in both", "model_mtp.safetensors")


def test_asymmetric_passes_only_with_zero_points(ct: Path) -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    packed = pack_compressed_tensors(quantize(weight, 32, symmetric=False))

    def asymmetric(tensors: dict[str, Tensor]) -> None:
        for module in int4_modules("ct", "9b"):
            scale = tensors[f"{module}.weight_scale"]
            zeros = torch.zeros(scale.shape[0] // 8, scale.shape[1], dtype=torch.int32)
            tensors[f"{module}.weight_zero_point"] = zeros
        for suffix, tensor in packed.items():
            tensors[f"{MODULE}.{suffix}"] = tensor

    edit_weights(ct, lambda weights: weights.update(symmetric=False))
    refused(ct, "lacks weight_zero_point")
    edit_tensors(ct, asymmetric)
    check_checkpoint(ct)
    edit_weights(ct, lambda weights: weights.update(symmetric=True))
    refused(ct, "says symmetric")
    edit_weights(ct, lambda weights: weights.update(symmetric=False))
    name = f"{MODULE}.weight_zero_point"
    edit_tensors(ct, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    refused(ct, MODULE, "weight_zero_point [31, 16]")


# --- files --------------------------------------------------------------------------------


def test_missing_or_broken_config(ct: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "config.json does not exist")
    (ct / "config.json").write_text("{")
    refused(ct, "cannot be read as JSON")
    (ct / "config.json").write_text("[]")
    refused(ct, "not a JSON object")
    (ct / "config.json").unlink()
    refused(ct, "config.json does not exist")


def test_missing_safetensors(ct: Path) -> None:
    (ct / "model.safetensors").unlink()
    refused(ct, "has no safetensors file")


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -4096])
def test_truncated_safetensors(ct: Path, keep: int) -> None:
    file = ct / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(ct, "model.safetensors", "truncated", "download it again")


def test_damaged_safetensors(ct: Path) -> None:
    file = ct / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content + b"\0")
    refused(ct, "belong to no tensor")
    file.write_bytes(content[:8] + b"x" + content[9:])
    refused(ct, "no valid safetensors header")
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].replace(b'"BF16"', b'"F32" ', 1)
    file.write_bytes(content[:8] + header + content[8 + length :])
    refused(ct, "header is damaged")


# --- configuration ------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 3, None, True])
def test_bits_not_4(ct: Path, gptq: Path, bits: object) -> None:
    edit_weights(ct, lambda weights: weights.update(num_bits=bits))
    refused(ct, "config group group_0", repr(bits), "4-bit")
    edit_config(gptq, lambda config: config.update(bits=bits))
    refused(gptq, repr(bits), "4-bit")


def test_bits_not_4_in_a_dynamic_rule(gptq: Path) -> None:
    edit_config(gptq, lambda config: config["dynamic"].update({"+:.*down_proj": {"bits": 8}}))
    refused(gptq, "+:.*down_proj", "8 bits")


def test_group_size_that_does_not_divide(ct: Path, gptq: Path) -> None:
    edit_weights(ct, lambda weights: weights.update(group_size=96))
    refused(
        ct, "Group size 96 does not divide the 512 input features of model.layers.0.mlp.down_proj"
    )
    edit_config(gptq, lambda config: config.update(group_size=96))
    refused(gptq, "Group size 96 does not divide")


def test_group_size_that_does_not_match_the_scales(ct: Path, gptq: Path) -> None:
    edit_weights(ct, lambda weights: weights.update(group_size=64))
    refused(ct, "contradicts itself", "16 scales per output", "which need 8")
    edit_config(gptq, lambda config: config.update(group_size=-1))
    refused(gptq, "contradicts itself", "which need 1")


@pytest.mark.parametrize("size", [0, -2, None, "32", True])
def test_group_size_that_is_none(ct: Path, gptq: Path, size: object) -> None:
    edit_weights(ct, lambda weights: weights.update(group_size=size))
    refused(ct, "no group size", repr(size))
    edit_config(gptq, lambda config: config.update(group_size=size))
    refused(gptq, "no group size", repr(size))


@pytest.mark.parametrize("actorder", ["group", "GROUP", "dynamic", True])
def test_group_act_order_ct(ct: Path, actorder: object) -> None:
    edit_weights(ct, lambda weights: weights.update(actorder=actorder))
    refused(ct, "act-order", repr(actorder))


@pytest.mark.parametrize("actorder", ["static", "weight", None, False])
def test_other_act_orders_pass(ct: Path, actorder: object) -> None:
    edit_weights(ct, lambda weights: weights.update(actorder=actorder))
    check_checkpoint(ct)


def test_group_act_order_by_tensor(ct: Path) -> None:
    index = torch.arange(512, dtype=torch.int32) // 32
    edit_tensors(ct, lambda tensors: tensors.update({f"{MODULE}.weight_g_idx": index}))
    refused(ct, "act-order", f"{MODULE}.weight_g_idx")


def test_group_act_order_gptq(gptq: Path) -> None:
    edit_config(gptq, lambda config: config["dynamic"].update({"x": {"desc_act": True}}))
    refused(gptq, "act-order", "dynamic rule 'x'")
    edit_config(gptq, lambda config: config.update(desc_act=True, dynamic={}))
    refused(gptq, "act-order", "desc_act true")


def test_other_quantisation_methods(ct: Path, gptq: Path) -> None:
    edit_config(gptq, lambda config: config.update(quant_method="awq"))
    refused(gptq, "'awq'")
    edit_config(gptq, lambda config: config.pop("quant_method"))
    refused(gptq, "'missing'")
    edit_config(ct, lambda config: config["config_groups"]["group_0"].update(format="dense"))
    refused(ct, "'dense'", "pack-quantized")


def test_other_ct_schemes(ct: Path) -> None:
    edit_weights(ct, lambda weights: weights.update(type="float"))
    refused(ct, "'float'")
    edit_weights(ct, lambda weights: weights.update(type="int", strategy="block"))
    refused(ct, "'block'")
    edit_weights(ct, lambda weights: weights.update(strategy="group"))
    group = {"input_activations": {"num_bits": 8}}
    edit_config(ct, lambda config: config["config_groups"]["group_0"].update(group))
    refused(ct, "activations")
    edit_config(ct, lambda config: config.update(config_groups={"group_0": {}}))
    refused(ct, "no weights entry")
    edit_config(ct, lambda config: config.update(config_groups={}))
    refused(ct, "no config_groups")


def test_autoround_label(gptq: Path) -> None:
    extra = {"mtp.fc": {"bits": 16, "data_type": "fp"}}
    edit_config(
        gptq,
        lambda config: config.update(
            quant_method="auto-round", packing_format="auto_round:auto_gptq", extra_config=extra
        ),
    )
    check_checkpoint(gptq)
    edit_config(gptq, lambda config: config["extra_config"].update({"x": {"bits": 8}}))
    refused(gptq, "extra_config of x", "8 bits")
    edit_config(gptq, lambda config: config.update(packing_format="auto_round:auto_awq"))
    refused(gptq, "auto_awq")


def test_config_and_weights_of_different_layouts(ct: Path, gptq: Path, bf16: Path) -> None:
    ct_config = (ct / "config.json").read_text()
    gptq_config = (gptq / "config.json").read_text()
    plain_config = (bf16 / "config.json").read_text()
    (ct / "config.json").write_text(gptq_config)
    refused(ct, "does not belong to the GPTQ layout")
    (gptq / "config.json").write_text(ct_config)
    refused(gptq, "does not belong to the compressed-tensors layout")
    (bf16 / "config.json").write_text(ct_config)
    refused(bf16, "no INT4 tensors")
    (gptq / "config.json").write_text(plain_config)
    refused(gptq, "has no quantization_config")


# --- tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_shape"])
def test_ct_module_lacks_a_tensor(ct: Path, suffix: str) -> None:
    edit_tensors(ct, lambda tensors: tensors.pop(f"{MODULE}.{suffix}"))
    refused(ct, MODULE, f"lacks {suffix}")


@pytest.mark.parametrize("suffix", ["qweight", "scales", "qzeros"])
def test_gptq_module_lacks_a_tensor(gptq: Path, suffix: str) -> None:
    edit_tensors(gptq, lambda tensors: tensors.pop(f"{MODULE}.{suffix}"))
    refused(gptq, MODULE, f"lacks {suffix}")


@pytest.mark.parametrize(
    ("format", "old", "new"),
    [
        ("ct", "weight_scale", "scale"),
        ("ct", "weight_packed", "packed_weight"),
        ("gptq", "scales", "scale"),
        ("gptq", "qweight", "weight_q"),
    ],
)
def test_renamed_tensor(format: str, old: str, new: str, ct: Path, gptq: Path) -> None:
    path = ct if format == "ct" else gptq

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors[f"{MODULE}.{new}"] = tensors.pop(f"{MODULE}.{old}")

    edit_tensors(path, rename)
    refused(path, MODULE, "rename")


def test_plain_weight_beside_int4(ct: Path) -> None:
    weight = torch.zeros(256, 512, dtype=torch.bfloat16)
    edit_tensors(ct, lambda tensors: tensors.update({f"{MODULE}.weight": weight}))
    refused(ct, MODULE, "both a plain weight and INT4")


@pytest.mark.parametrize(
    ("format", "suffix"),
    [("ct", "weight_packed"), ("gptq", "qweight"), ("gptq", "qzeros")],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_packed_weights_that_are_not_int32(
    format: str, suffix: str, dtype: torch.dtype, ct: Path, gptq: Path
) -> None:
    path = ct if format == "ct" else gptq
    name = f"{MODULE}.{suffix}"
    edit_tensors(path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused(path, name, "int32")


@pytest.mark.parametrize("format", ["ct", "gptq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int32])
def test_scales_in_an_unexpected_dtype(
    format: str, dtype: torch.dtype, ct: Path, gptq: Path
) -> None:
    path, suffix = (ct, "weight_scale") if format == "ct" else (gptq, "scales")
    name = f"{MODULE}.{suffix}"
    edit_tensors(path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused(path, name, "BF16 or F16")


@pytest.mark.parametrize(
    ("suffix", "tensor", "fragment"),
    [
        ("weight_packed", torch.zeros(256, 63, dtype=torch.int32), "weight_packed [256, 63]"),
        ("weight_packed", torch.zeros(64, 256, dtype=torch.int32), "weight_packed [64, 256]"),
        ("weight_shape", torch.tensor([512, 256]), "weight_shape [512, 256]"),
        ("weight_shape", torch.tensor([256, 512, 1]), "I64 [3]"),
        ("weight_shape", torch.tensor([256.0, 512.0]), "F32 [2]"),
        ("weight_scale", torch.zeros(255, 16, dtype=torch.bfloat16), "weight_scale [255, 16]"),
        ("weight_scale", torch.zeros(256, dtype=torch.bfloat16), "weight_scale [256]"),
        ("weight_scale", torch.zeros(256, 8, dtype=torch.bfloat16), "8 scales per output"),
    ],
)
def test_ct_shapes_that_contradict(ct: Path, suffix: str, tensor: Tensor, fragment: str) -> None:
    edit_tensors(ct, lambda tensors: tensors.update({f"{MODULE}.{suffix}": tensor}))
    refused(ct, MODULE, fragment)


@pytest.mark.parametrize(
    ("suffix", "tensor", "fragment"),
    [
        ("qweight", torch.zeros(64, dtype=torch.int32), "qweight [64]"),
        ("qweight", torch.zeros(32, 256, dtype=torch.int32), "16 scales per output"),
        ("scales", torch.zeros(256, 16, dtype=torch.bfloat16), "scales [256, 16]"),
        ("scales", torch.zeros(8, 256, dtype=torch.bfloat16), "8 scales per output"),
        ("qzeros", torch.zeros(16, 256, dtype=torch.int32), "qzeros [16, 256]"),
        ("g_idx", torch.zeros(256, dtype=torch.int32), "g_idx [256]"),
    ],
)
def test_gptq_shapes_that_contradict(
    gptq: Path, suffix: str, tensor: Tensor, fragment: str
) -> None:
    edit_tensors(gptq, lambda tensors: tensors.update({f"{MODULE}.{suffix}": tensor}))
    refused(gptq, MODULE, fragment)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is no index of weight files"):
        is_complete(tmp_path)
