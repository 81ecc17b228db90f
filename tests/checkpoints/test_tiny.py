"""Tiny checkpoints: determinism, sets of INT4 modules, configuration, atomic writing."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vllm_b70.checkpoints import tiny
from vllm_b70.checkpoints.check import check_checkpoint
from vllm_b70.checkpoints.errors import CheckpointError
from vllm_b70.checkpoints.pack import unpack_compressed_tensors, unpack_gptq
from vllm_b70.checkpoints.tiny import SHAPES, Format, ShapeName, int4_modules, make_tiny

FORMATS: list[Format] = ["ct", "gptq", "bf16"]
SHAPE_NAMES: list[ShapeName] = ["9b", "27b"]

PACKED = {"ct": ".weight_packed", "gptq": ".qweight"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, bool], Path]:
    """One checkpoint of every format and shape, causal and conditional."""
    root = tmp_path_factory.mktemp("tiny")
    found: dict[tuple[str, str, bool], Path] = {}
    for format in FORMATS:
        for shape in SHAPE_NAMES:
            for conditional in (False, True):
                path = root / f"{format}-{shape}-{conditional}"
                make_tiny(path, format=format, shape=shape, conditional=conditional)
                found[format, shape, conditional] = path
    return found


def config_of(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((path / "config.json").read_text())
    return loaded


def tensors_of(path: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = load_file(path / "model.safetensors")
    return loaded


def digests(path: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())
    }


@pytest.mark.parametrize("format", FORMATS)
def test_same_arguments_give_same_bytes(
    format: Format, built: dict[tuple[str, str, bool], Path], tmp_path: Path
) -> None:
    make_tiny(tmp_path / "again", format=format, shape="27b", conditional=True)
    assert digests(tmp_path / "again") == digests(built[format, "27b", True])
    make_tiny(tmp_path / "other", format=format, shape="27b", conditional=True, seed=1)
    changed = digests(tmp_path / "other")
    assert changed["model.safetensors"] != digests(tmp_path / "again")["model.safetensors"]
    assert changed["config.json"] == digests(tmp_path / "again")["config.json"]


def test_bytes_do_not_depend_on_threads_or_global_seed(
    built: dict[tuple[str, str, bool], Path], tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        torch.manual_seed(1234)
        make_tiny(tmp_path / "again", format="ct", shape="9b")
    finally:
        torch.set_num_threads(threads)
    assert digests(tmp_path / "again") == digests(built["ct", "9b", False])


EXPECTED_INT4 = {
    "9b": r"layers\.\d\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "27b": r"layers\.\d\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))",
}
EXPECTED_COUNT = {"9b": 4 * 3 + 4, "27b": 4 * 3 + 4 + 3 * 3 + 7}


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("shape", SHAPE_NAMES)
@pytest.mark.parametrize("format", ["ct", "gptq"])
def test_int4_modules(
    format: Format,
    shape: ShapeName,
    conditional: bool,
    built: dict[tuple[str, str, bool], Path],
) -> None:
    tensors = tensors_of(built[format, shape, conditional])
    suffix = PACKED[format]
    packed = {name.removesuffix(suffix) for name in tensors if name.endswith(suffix)}
    assert packed == int4_modules(format, shape, conditional=conditional)
    assert len(packed) == EXPECTED_COUNT[shape]
    prefix = r"model\.language_model\." if conditional else r"model\."
    mtp = r"|mtp\." if shape == "27b" else ""
    assert all(re.fullmatch(f"({prefix}{mtp}){EXPECTED_INT4[shape]}", name) for name in packed)
    for name in ("lm_head.weight", "mtp.fc.weight"):
        assert tensors[name].dtype == torch.bfloat16


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("shape", SHAPE_NAMES)
@pytest.mark.parametrize("format", FORMATS)
def test_own_checkpoints_pass_the_check(
    format: Format,
    shape: ShapeName,
    conditional: bool,
    built: dict[tuple[str, str, bool], Path],
) -> None:
    path = built[format, shape, conditional]
    check_checkpoint(path)
    architecture = "ForConditionalGeneration" if conditional else "ForCausalLM"
    assert config_of(path)["architectures"] == [f"Qwen3_5{architecture}"]
    visual = [name for name in tensors_of(path) if name.startswith("model.visual.")]
    assert bool(visual) == conditional
    assert sum(file.stat().st_size for file in path.iterdir()) < 16e6


@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_layouts_agree_and_quantise_the_plain_weights(
    shape: ShapeName, built: dict[tuple[str, str, bool], Path]
) -> None:
    ct, gptq, plain = (tensors_of(built[format, shape, False]) for format in FORMATS)
    modules = int4_modules("ct", shape)
    for module in modules:
        first = unpack_compressed_tensors(
            {
                suffix: ct[f"{module}.{suffix}"]
                for suffix in ("weight_packed", "weight_scale", "weight_shape")
            }
        )
        second = unpack_gptq(
            {suffix: gptq[f"{module}.{suffix}"] for suffix in ("qweight", "qzeros", "scales")},
            symmetric=True,
        )
        assert torch.equal(first.dequantize(), second.dequantize())
        weight = plain[f"{module}.weight"].float()
        step = first.scales.float().repeat_interleave(first.group_size, dim=1)
        assert ((first.dequantize() - weight).abs() <= 0.6 * step).all()
    for name, tensor in plain.items():
        if name.removesuffix(".weight") not in modules:
            assert torch.equal(ct[name].float(), tensor.float())
            assert torch.equal(gptq[name], ct[name])


@pytest.mark.parametrize("format", FORMATS)
def test_dtype_of_every_float_tensor(format: Format, tmp_path: Path) -> None:
    make_tiny(tmp_path / "half", format=format, shape="27b", dtype="float16")
    tensors = tensors_of(tmp_path / "half")
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    wide = {name for name, tensor in floats.items() if tensor.dtype == torch.float32}
    kept_wide = {
        f"model.layers.{layer}.linear_attn.{name}"
        for layer in range(3)
        for name in ("A_log", "norm.weight")
    }
    assert wide == (kept_wide if format == "bf16" else set())
    assert {tensor.dtype for name, tensor in floats.items() if name not in wide} == {torch.float16}
    assert all(torch.isfinite(tensor).all() for tensor in floats.values())
    assert config_of(tmp_path / "half")["dtype"] == "float16"


@pytest.mark.parametrize("format", ["ct", "gptq"])
@pytest.mark.parametrize("group", [64, 128, -1])
def test_group_sizes(format: Format, group: int, tmp_path: Path) -> None:
    for shape in SHAPE_NAMES:
        path = tmp_path / shape
        make_tiny(path, format=format, shape=shape, group_size=group)
        check_checkpoint(path)


def test_ratios_of_the_shapes() -> None:
    for name, queries, values in (("9b", 4, 2), ("27b", 6, 3)):
        dims = SHAPES[name]  # type: ignore[index]
        assert dims.heads == queries * dims.kv_heads
        assert dims.linear_value_heads == values * dims.linear_key_heads
        assert dims.layer_types == ["linear_attention"] * 3 + ["full_attention"]


def test_ct_ignore_list_follows_the_published_style(
    built: dict[tuple[str, str, bool], Path],
) -> None:
    ignore = config_of(built["ct", "9b", True])["quantization_config"]["ignore"]
    first = "model.language_model.layers.0.linear_attn."
    names = ("out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    assert ignore[6:11] == [first + name for name in names]
    assert ignore[-2:] == ["lm_head", "re:^mtp.*"]
    assert len(ignore) == 6 + 3 * 5 + 2


def test_gptq_rules_exclude_the_head_projection_without_naming_the_head(
    built: dict[tuple[str, str, bool], Path],
) -> None:
    rules = config_of(built["gptq", "27b", False])["quantization_config"]["dynamic"]
    assert all(key.startswith("-:") and "mtp" not in key for key in rules)

    def excluded(module: str) -> bool:
        return any(re.match(key.removeprefix("-:"), module) for key in rules)

    assert excluded("mtp.fc")
    assert excluded("model.layers.0.linear_attn.in_proj_ba")
    assert not excluded("mtp.layers.0.mlp.down_proj")
    assert not excluded("model.layers.0.linear_attn.in_proj_qkvz")


def test_without_mtp(tmp_path: Path) -> None:
    for format in FORMATS:
        path = tmp_path / format
        make_tiny(path, format=format, shape="27b", mtp=False)
        assert not any(name.startswith("mtp") for name in tensors_of(path))
        assert config_of(path)["mtp_num_hidden_layers"] == 0
        assert not any(
            "mtp" in name for name in int4_modules(format, "27b", conditional=False, mtp=False)
        )
        assert "mtp.fc" not in json.dumps(config_of(path))
        check_checkpoint(path)


@pytest.mark.parametrize("format", ["ct", "gptq"])
def test_act_order(format: Format, tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", format=format, shape="9b", desc_act=True)
    name = "g_idx" if format == "gptq" else "weight_g_idx"
    groups = tensors_of(tmp_path / "model")[f"model.layers.0.mlp.down_proj.{name}"]
    assert groups.dtype == torch.int32
    assert torch.equal(torch.bincount(groups), torch.full((16,), 32))
    assert not torch.equal(groups, groups.sort().values)
    with pytest.raises(CheckpointError, match="act-order"):
        check_checkpoint(tmp_path / "model")


def test_tokenizer_maps_bytes(built: dict[tuple[str, str, bool], Path]) -> None:
    transformers = pytest.importorskip("transformers")
    text = "Hé \n\t\x00\x7f 木  a"
    for conditional in (False, True):
        path = built["ct", "9b", conditional]
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        ids = tokenizer(text)["input_ids"]
        assert ids == [byte + 1 for byte in text.encode()]
        assert tokenizer.decode(ids) == text
        assert tokenizer("a<|endoftext|>")["input_ids"] == [98, 0]
        assert (tokenizer.eos_token_id, len(tokenizer)) == (0, 1024)
        assert isinstance(tokenizer.decode([300, 1019]), str)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_transformers_accepts_config_and_tensor_names(
    shape: ShapeName, conditional: bool, built: dict[tuple[str, str, bool], Path]
) -> None:
    transformers = pytest.importorskip("transformers")
    path = built["bf16", shape, conditional]
    config = transformers.AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    assert text.model_type == "qwen3_5_text"
    assert text.num_attention_heads == SHAPES[shape].heads
    assert text.mtp_num_hidden_layers == 1
    name = "Qwen3_5ForConditionalGeneration" if conditional else "Qwen3_5ForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    stored = {
        key: tuple(value.shape)
        for key, value in tensors_of(path).items()
        if not key.startswith("mtp.")
    }
    assert stored == expected


def test_vllm_resolves_the_same_int4_modules(
    built: dict[tuple[str, str, bool], Path],
) -> None:
    """vLLM's own configuration classes, fed with its fused module names."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.model_loader.utils import configure_quant_config
    from vllm.model_executor.models.qwen3_5 import (
        Qwen3_5ForCausalLM,
        Qwen3_5ForConditionalGeneration,
    )
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP

    class BareLinear(LinearBase):  # type: ignore[misc]
        """A linear layer by type only; the real ones need process groups."""

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    target = {
        "layers.0.linear_attn.in_proj_qkvz": "in_proj_qkv",
        "layers.0.linear_attn.in_proj_ba": "in_proj_b",
        "layers.0.linear_attn.out_proj": "out_proj",
        "layers.0.mlp.gate_up_proj": "gate_proj",
        "layers.0.mlp.down_proj": "down_proj",
        "layers.3.self_attn.qkv_proj": "q_proj",
        "layers.3.self_attn.o_proj": "o_proj",
    }
    draft = {
        "mtp.fc": "fc",
        "mtp.layers.0.self_attn.qkv_proj": "q_proj",
        "mtp.layers.0.self_attn.o_proj": "o_proj",
        "mtp.layers.0.mlp.gate_up_proj": "gate_proj",
        "mtp.layers.0.mlp.down_proj": "down_proj",
    }
    for (format, shape, conditional), path in built.items():
        if format == "bf16":
            continue
        kind = CompressedTensorsConfig if format == "ct" else AutoGPTQConfig
        quant_config = kind.from_config(config_of(path)["quantization_config"])
        quant_config.maybe_update_config(str(path))
        int4 = int4_modules(format, shape, conditional=conditional)  # type: ignore[arg-type]

        def is_int4(prefix: str, quant_config: Any = quant_config) -> bool:
            method = quant_config.get_quant_method(BareLinear(), prefix)
            return not isinstance(method, UnquantizedLinearMethod)

        def check_all(
            conditional: bool = conditional,
            quant_config: Any = quant_config,
            is_int4: Any = is_int4,
            int4: Any = int4,
        ) -> None:
            model = Qwen3_5ForConditionalGeneration if conditional else Qwen3_5ForCausalLM
            configure_quant_config(quant_config, model)
            vllm_prefix = "language_model.model." if conditional else "model."
            own_prefix = "model.language_model." if conditional else "model."
            for fused, part in target.items():
                own = own_prefix + fused.rpartition(".")[0] + "." + part
                assert is_int4(vllm_prefix + fused) == (own in int4), own
            if conditional:
                assert not is_int4("visual.blocks.0.attn.qkv")
            configure_quant_config(quant_config, Qwen3_5MTP)
            for fused, part in draft.items():
                own = fused.rpartition(".")[0] + "." + part
                assert is_int4(fused) == (own in int4), own

        check_all()
        if format == "gptq":
            # vLLM also knows the INT4 modules from the safetensors headers; the rules of the
            # configuration must be sufficient without them.
            quant_config.modules_in_block_to_quantize = []
            check_all()
            draft_unquantised = any("mtp" in key for key in quant_config.dynamic)
            assert draft_unquantised == (shape == "9b")


def test_target_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        make_tiny(tmp_path, format="ct", shape="9b")
    with pytest.raises(CheckpointError, match="is a file"):
        make_tiny(tmp_path / "kept", format="ct", shape="9b")
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_empty_target_and_missing_parents_are_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_tiny(tmp_path / "empty", format="ct", shape="9b")
    make_tiny(tmp_path / "a" / "b" / "model", format="ct", shape="9b")
    assert digests(tmp_path / "empty") == digests(tmp_path / "a" / "b" / "model")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "empty"]
    assert [file.name for file in (tmp_path / "a" / "b").iterdir()] == ["model"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_names_directory_and_bytes_and_leaves_nothing(
    code: int,
    built: dict[tuple[str, str, bool], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = tiny._write_file

    def full(path: Path, content: bytes) -> None:
        if path.name == "model.safetensors":
            write(path, content[: len(content) // 2])
            raise OSError(code, "no space")
        write(path, content)

    monkeypatch.setattr(tiny, "_write_file", full)
    target = tmp_path / "a" / "model"
    needed = sum(file.stat().st_size for file in built["ct", "9b", False].iterdir())
    with pytest.raises(CheckpointError, match=f"{re.escape(str(target))}.*{needed} bytes"):
        make_tiny(target, format="ct", shape="9b")
    assert list(tmp_path.iterdir()) == []


def test_other_errors_pass_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "_write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_tiny(tmp_path / "model", format="ct", shape="9b")
    assert list(tmp_path.iterdir()) == []


def test_target_filled_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    write = tiny._write_file

    def racing(path: Path, content: bytes) -> None:
        target.mkdir(exist_ok=True)
        (target / "theirs").write_text("x")
        write(path, content)

    monkeypatch.setattr(tiny, "_write_file", racing)
    with pytest.raises(CheckpointError, match="not empty"):
        make_tiny(target, format="ct", shape="9b")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert [file.name for file in target.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "awq"}, "unknown format"),
        ({"shape": "4b"}, "unknown shape"),
        ({"dtype": "float32"}, "unknown dtype"),
        ({"group_size": 0}, "group size"),
        ({"group_size": 48}, "group size"),
        ({"format": "bf16", "desc_act": True}, "act-order"),
        ({"group_size": -1, "desc_act": True}, "act-order"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_tiny(tmp_path / "model", **{"format": "ct", "shape": "9b", **arguments})
    assert list(tmp_path.iterdir()) == []
