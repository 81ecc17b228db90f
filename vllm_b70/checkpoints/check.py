"""Refuse unusable INT4 checkpoints before a server spends minutes loading them.

Only ``config.json`` and the safetensors headers are read, and of the tensor data no more than
the two numbers of each compressed-tensors ``weight_shape``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_b70.checkpoints.errors import CheckpointError

_MAX_HEADER = 100 * 1024 * 1024
"""Limit of the safetensors format itself."""

_DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}

_SCALE_DTYPES = ("BF16", "F16")
_PACK = 8

_CT_REQUIRED = ("weight_packed", "weight_scale", "weight_shape")
_CT_ALL = (*_CT_REQUIRED, "weight_zero_point", "weight_g_idx")
_GPTQ_REQUIRED = ("qweight", "scales", "qzeros")
_GPTQ_ALL = (*_GPTQ_REQUIRED, "g_idx")


@dataclass(frozen=True)
class _Tensor:
    """One header entry; ``start`` and ``end`` are absolute offsets in ``file``."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class _Scheme:
    """What the configuration promises about every INT4 module."""

    layout: str  # "ct" or "gptq"
    group_sizes: frozenset[int]  # -1 is channelwise
    symmetric: bool | None  # None if several groups differ


def check_checkpoint(directory: Path) -> None:
    """Check the form of a checkpoint: compressed-tensors or GPTQ INT4, or not quantised at all.

    Args:
        directory: holds ``config.json`` and one or more ``*.safetensors`` files.

    Raises:
        CheckpointError: one sentence naming what is wrong, why it matters and what to do.
    """
    config = _read_config(directory)
    tensors = _read_headers(directory)
    quantization = _quantization_config(config)
    if quantization is None:
        for name, tensor in tensors.items():
            suffix = name.rpartition(".")[2]
            if suffix in (*_CT_ALL, *_GPTQ_ALL) or tensor.dtype == "I32":
                raise CheckpointError(
                    f"{name} is a quantised tensor but config.json has no quantization_config, so "
                    "it would be loaded as a plain weight; restore the original config.json."
                )
        return
    scheme = _scheme(quantization)
    modules = _int4_modules(tensors, scheme.layout)
    if not modules:
        raise CheckpointError(
            f"{directory} has a quantization_config but no INT4 tensors, so the weights belong to "
            "another model or have been renamed; download the checkpoint again."
        )
    _check_draft_blocks(quantization, modules)
    for module, parts in sorted(modules.items()):
        if f"{module}.weight" in tensors:
            raise CheckpointError(
                f"{module} has both a plain weight and INT4 tensors, so it is not clear which one "
                "counts; remove the tensor that does not belong there."
            )
        if scheme.layout == "ct":
            _check_ct_module(module, parts, scheme)
        else:
            _check_gptq_module(module, parts, scheme)


# --- configuration ------------------------------------------------------------------------


def is_complete(directory: Path) -> bool:
    """Whether all weight files are there: those that the index names, or any without an index.

    A hub's snapshot holds the configuration before the weights arrive, and some before others.

    Raises:
        CheckpointError: the index is not one.
    """
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return any(directory.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is no index of weight files ({error}): download the checkpoint again."
        ) from error
    return all((directory / name).exists() for name in names)


def has_mtp_head(directory: Path) -> bool:
    """Whether the checkpoint holds tensors of a multi-token-prediction head (``mtp.*``).

    Raises:
        CheckpointError: a safetensors file cannot be read.
    """
    return any(name.startswith("mtp.") for name in _read_headers(directory))


def weight_bytes(directory: Path) -> int:
    """Bytes of all tensors, a vision tower left out: served with ``--language-model-only``.

    Raises:
        CheckpointError: a safetensors file cannot be read.
    """
    return sum(
        tensor.end - tensor.start
        for name, tensor in _read_headers(directory).items()
        if ".visual." not in f".{name}"
    )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{path} does not exist, and without it the model's form is unknown; "
            "give the directory of a complete checkpoint."
        ) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}), so the model's form is unknown; "
            "download the file again."
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path} is not a JSON object, so the model's form is unknown; download it again."
        )
    return config


def _quantization_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    found = config.get("quantization_config")
    text = config.get("text_config")
    if not found and isinstance(text, dict):
        found = text.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(
            "quantization_config in config.json is not an object, so the INT4 layout is unknown; "
            "restore the original config.json."
        )
    return found


def _scheme(quantization: Mapping[str, Any]) -> _Scheme:
    method = str(quantization.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        return _ct_scheme(quantization)
    if method in ("gptq", "auto-round"):
        return _gptq_scheme(quantization, method)
    raise CheckpointError(
        f"quant_method is {method or 'missing'!r}, for which there is no INT4 path here; "
        "use a compressed-tensors (pack-quantized) or GPTQ checkpoint."
    )


def _require_4_bits(bits: object, where: str) -> None:
    if isinstance(bits, bool) or bits != 4:
        raise CheckpointError(
            f"{where} asks for {bits!r} bits, but the kernels read 4-bit weights only; "
            "use a W4A16 checkpoint."
        )


def _require_group_size(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (value <= 0 and value != -1):
        raise CheckpointError(
            f"{where} is {value!r}, which is no group size; it must be a positive number or -1 "
            "(channelwise), so correct config.json or use another checkpoint."
        )
    return value


def _refuse_act_order(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} selects group act-order, whose scattered groups the kernels cannot read; "
        "quantise again with static act-order or none."
    )


def _ct_scheme(quantization: Mapping[str, Any]) -> _Scheme:
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(
            "quantization_config has no config_groups, so the INT4 layout is unknown; "
            "restore the original config.json."
        )
    default_format = quantization.get("format")
    sizes: set[int] = set()
    symmetries: set[bool] = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise CheckpointError(
                f"config group {name} has no weights entry, so the INT4 layout is unknown; "
                "restore the original config.json."
            )
        where = f"config group {name}"
        layout = group.get("format") or default_format
        if layout != "pack-quantized":
            raise CheckpointError(
                f"{where} has the format {layout!r}, but only pack-quantized holds INT4 weights "
                "as they are read here; use a W4A16 checkpoint."
            )
        _require_4_bits(weights.get("num_bits"), where)
        if weights.get("type", "int") != "int":
            raise CheckpointError(
                f"{where} has weights of type {weights['type']!r}, but the kernels read integers "
                "only; use a W4A16 checkpoint."
            )
        if group.get("input_activations"):
            raise CheckpointError(
                f"{where} quantises activations too, but the kernels take 16-bit activations; "
                "use a W4A16 checkpoint."
            )
        # compressed-tensors reads true and "dynamic" as "group", and false as none.
        actorder = weights.get("actorder")
        if actorder is True or str(actorder).lower() in ("group", "dynamic"):
            raise _refuse_act_order(f"actorder {actorder!r} of {where}")
        strategy, size = weights.get("strategy"), weights.get("group_size")
        if strategy is None:
            strategy = "group" if size not in (None, -1) else "channel"
        if strategy == "channel":
            sizes.add(-1)
        elif strategy == "group":
            sizes.add(_require_group_size(size, f"group_size of {where}"))
        else:
            raise CheckpointError(
                f"{where} has the strategy {strategy!r}, but the kernels read scales per group or "
                "per channel only; use a W4A16 checkpoint."
            )
        symmetries.add(bool(weights.get("symmetric", True)))
    return _Scheme("ct", frozenset(sizes), symmetries.pop() if len(symmetries) == 1 else None)


def _gptq_scheme(quantization: Mapping[str, Any], method: str) -> _Scheme:
    packing = str(quantization.get("packing_format") or "auto_round:auto_gptq")
    if method == "auto-round" and "gptq" not in packing:
        raise CheckpointError(
            f"packing_format is {packing!r}, but of AutoRound's layouts only auto_gptq is read "
            "here; export again in that layout."
        )
    _require_4_bits(quantization.get("bits"), "quantization_config")
    size = _require_group_size(quantization.get("group_size"), "group_size")
    # With one group per channel there is nothing to reorder, and vLLM ignores the flag too.
    if quantization.get("desc_act") and size != -1:
        raise _refuse_act_order("desc_act true")
    sizes = {size}
    symmetries = {bool(quantization.get("sym", True))}
    dynamic = quantization.get("dynamic") or {}
    for pattern, override in dynamic.items():
        if pattern.startswith("-:") or not isinstance(override, dict):
            continue
        where = f"dynamic rule {pattern!r}"
        _require_4_bits(override.get("bits", 4), where)
        rule_size = _require_group_size(override.get("group_size", size), f"group_size of {where}")
        if override.get("desc_act") and rule_size != -1:
            raise _refuse_act_order(f"desc_act true in {where}")
        sizes.add(rule_size)
        symmetries.add(bool(override.get("sym", quantization.get("sym", True))))
    extra = quantization.get("extra_config") or {}
    for module, override in extra.items():
        if not isinstance(override, dict):
            continue
        bits = override.get("bits", 4)
        if isinstance(bits, int) and bits >= 16:
            continue  # AutoRound's way to leave a module unquantised
        where = f"extra_config of {module}"
        _require_4_bits(bits, where)
        sizes.add(_require_group_size(override.get("group_size", size), f"group_size of {where}"))
    return _Scheme("gptq", frozenset(sizes), symmetries.pop() if len(symmetries) == 1 else None)


def _check_draft_blocks(quantization: Mapping[str, Any], modules: Iterable[str]) -> None:
    """vLLM builds draft layers that AutoRound's list of blocks leaves out unquantised."""
    blocks = quantization.get("block_name_to_quantize") or quantization.get("to_quant_block_names")
    names = blocks.split(",") if isinstance(blocks, str) else blocks
    draft = sorted(module for module in modules if module.startswith("mtp."))
    if names and draft and not any(draft[0].startswith(name.strip()) for name in names):
        raise CheckpointError(
            f"{draft[0]} is INT4, but block_name_to_quantize in config.json names only "
            f"{', '.join(names)}, so vLLM would build the MTP layers unquantised; add "
            '"mtp.layers" to it.'
        )


# --- safetensors --------------------------------------------------------------------------


def _read_headers(directory: Path) -> dict[str, _Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{directory} has no safetensors file, so there are no weights to load; "
            "give the directory of a complete checkpoint."
        )
    tensors: dict[str, _Tensor] = {}
    for file in files:
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is in both {tensors[name].file.name} and {file.name}, so it is not "
                    "clear which one counts; remove the file that does not belong there."
                )
            tensors[name] = tensor
    return tensors


def _read_header(file: Path) -> dict[str, _Tensor]:
    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
            if length is None or length > total - 8:
                raise CheckpointError(
                    f"{file} ends within its header, so the file is truncated; download it again."
                )
            if length > _MAX_HEADER:
                raise CheckpointError(
                    f"{file} claims a header of {length} bytes, which no safetensors file has; "
                    "download it again."
                )
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}), so its weights cannot be loaded; "
            "check the file and its permissions."
        ) from error
    data = 8 + length
    try:
        header = json.loads(raw)
        tensors = {
            name: _Tensor(
                str(entry["dtype"]),
                tuple(int(size) for size in entry["shape"]),
                file,
                data + int(entry["data_offsets"][0]),
                data + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} has no valid safetensors header ({error!r}), so its tensors are unknown; "
            "download it again."
        ) from error
    for name, tensor in tensors.items():
        width = _DTYPE_BYTES.get(tensor.dtype)
        count = 1
        for size in tensor.shape:
            count *= size
        if width is not None and tensor.end - tensor.start != count * width:
            raise CheckpointError(
                f"{name} in {file} is {tensor} but occupies {tensor.end - tensor.start} bytes, so "
                "the header is damaged; download the file again."
            )
    expected = max((tensor.end for tensor in tensors.values()), default=data)
    if expected != total:
        problem = "is truncated" if total < expected else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{file} has {total} bytes where its header calls for {expected}, so it {problem}; "
            "download it again."
        )
    return tensors


def _read_weight_shape(module: str, tensor: _Tensor) -> tuple[int, int]:
    """Return N, K as stored in a ``weight_shape`` tensor."""
    formats = {"I64": "<2q", "I32": "<2i"}
    if tensor.shape != (2,) or tensor.dtype not in formats:
        raise CheckpointError(
            f"{module}.weight_shape is {tensor} where two int64 numbers are expected, so the "
            "size of the weight is unknown; quantise again with compressed-tensors."
        )
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        n, k = struct.unpack(formats[tensor.dtype], stream.read(tensor.end - tensor.start))
    return n, k


# --- modules ------------------------------------------------------------------------------


def _int4_modules(tensors: Mapping[str, _Tensor], layout: str) -> dict[str, dict[str, _Tensor]]:
    """Group the INT4 tensors by module; refuse those of the other layout and unknown ones."""
    own, other = (_CT_ALL, _GPTQ_ALL) if layout == "ct" else (_GPTQ_ALL, _CT_ALL)
    modules: dict[str, dict[str, _Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix in own:
            modules.setdefault(module, {})[suffix] = tensor
        elif suffix in other:
            label = "compressed-tensors" if layout == "ct" else "GPTQ"
            raise CheckpointError(
                f"{name} does not belong to the {label} layout that config.json names, so it "
                "would not be loaded; restore the matching config.json or weights."
            )
        elif tensor.dtype in ("I32", "U32"):
            raise CheckpointError(
                f"{name} is {tensor} but {suffix!r} is no known name of a packed tensor, so it "
                f"would not be loaded; rename it (expected: {', '.join(own)})."
            )
    return modules


def _require_parts(module: str, parts: Mapping[str, _Tensor], required: tuple[str, ...]) -> None:
    missing = [suffix for suffix in required if suffix not in parts]
    if missing:
        raise CheckpointError(
            f"{module} has {', '.join(sorted(parts))} but lacks {', '.join(missing)}, so its "
            "INT4 weight cannot be rebuilt; rename the tensor if its name was changed, or "
            "download the checkpoint again."
        )


def _require_dtypes(
    module: str, parts: Mapping[str, _Tensor], packed: tuple[str, ...], scale: str
) -> None:
    for suffix in packed:
        if suffix in parts and parts[suffix].dtype != "I32":
            raise CheckpointError(
                f"{module}.{suffix} is stored as {parts[suffix].dtype}, but eight nibbles are "
                "packed into each int32 (I32); quantise again in the documented layout."
            )
    if parts[scale].dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{module}.{scale} is stored as {parts[scale].dtype}, but scales must be BF16 or F16 "
            "like the activations; convert the scales or quantise again."
        )


def _contradiction(module: str, left: str, right: str) -> CheckpointError:
    return CheckpointError(
        f"{module} contradicts itself: {left} does not fit {right}, so the weight cannot be "
        "rebuilt; download the checkpoint again."
    )


def _groups_along_k(module: str, k: int, groups: int, scheme: _Scheme) -> None:
    """Check that ``groups`` scales along K follow from one of the configured group sizes."""
    fitting = [size for size in scheme.group_sizes if size == -1 or k % size == 0]
    if not fitting:
        sizes = ", ".join(str(size) for size in sorted(scheme.group_sizes))
        raise CheckpointError(
            f"Group size {sizes} does not divide the {k} input features of {module}, so its "
            "last group would be incomplete; quantise again with a group size that divides "
            f"{k}."
        )
    expected = {1 if size == -1 else k // size for size in fitting}
    if groups not in expected:
        wanted = " or ".join(str(count) for count in sorted(expected))
        raise _contradiction(
            module, f"{groups} scales per output", f"{k} input features, which need {wanted}"
        )


def _check_ct_module(module: str, parts: Mapping[str, _Tensor], scheme: _Scheme) -> None:
    required: tuple[str, ...] = _CT_REQUIRED
    if scheme.symmetric is False:
        required = (*required, "weight_zero_point")
    if "weight_g_idx" in parts:
        raise _refuse_act_order(f"{module}.weight_g_idx")
    _require_parts(module, parts, required)
    if scheme.symmetric is True and "weight_zero_point" in parts:
        raise CheckpointError(
            f"{module} has a weight_zero_point although config.json says symmetric, so the zero "
            "points would be ignored; correct config.json or quantise again."
        )
    _require_dtypes(module, parts, ("weight_packed", "weight_zero_point"), "weight_scale")
    n, k = _read_weight_shape(module, parts["weight_shape"])
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    if packed.shape != (n, -(-k // _PACK)):
        raise _contradiction(
            module, f"weight_packed {list(packed.shape)}", f"weight_shape [{n}, {k}]"
        )
    if len(scale.shape) != 2 or scale.shape[0] != n:
        raise _contradiction(
            module, f"weight_scale {list(scale.shape)}", f"weight_shape [{n}, {k}]"
        )
    _groups_along_k(module, k, scale.shape[1], scheme)
    zero = parts.get("weight_zero_point")
    if zero is not None and zero.shape != (-(-n // _PACK), scale.shape[1]):
        raise _contradiction(
            module,
            f"weight_zero_point {list(zero.shape)}",
            f"weight_scale {list(scale.shape)}",
        )


def _check_gptq_module(module: str, parts: Mapping[str, _Tensor], scheme: _Scheme) -> None:
    _require_parts(module, parts, _GPTQ_REQUIRED)
    _require_dtypes(module, parts, ("qweight", "qzeros", "g_idx"), "scales")
    qweight, scales, qzeros = parts["qweight"], parts["scales"], parts["qzeros"]
    if len(qweight.shape) != 2:
        raise _contradiction(module, f"qweight {list(qweight.shape)}", "a matrix [K/8, N]")
    k, n = qweight.shape[0] * _PACK, qweight.shape[1]
    if len(scales.shape) != 2 or scales.shape[1] != n:
        raise _contradiction(
            module, f"scales {list(scales.shape)}", f"qweight {list(qweight.shape)}"
        )
    _groups_along_k(module, k, scales.shape[0], scheme)
    if n % _PACK or qzeros.shape != (scales.shape[0], n // _PACK):
        raise _contradiction(module, f"qzeros {list(qzeros.shape)}", f"scales {list(scales.shape)}")
    g_idx = parts.get("g_idx")
    if g_idx is not None and g_idx.shape != (k,):
        raise _contradiction(module, f"g_idx {list(g_idx.shape)}", f"{k} input features")
