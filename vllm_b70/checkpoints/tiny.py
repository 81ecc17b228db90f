"""Tiny random Qwen3.5 checkpoints that vLLM can serve, in the layouts of the real ones.

Two shapes keep the ratios that kernels and loaders care about:

* ``9b``: 4 query heads per KV head, twice as many linear value heads as key heads; INT4 in the
  decoder layers' MLP and self attention only.
* ``27b``: 6 query heads per KV head, three times as many linear value heads as key heads; INT4
  also in the large gated-delta-net (GDN) projections and in the MTP layer.

The weights are not noise alone. The LM head is a permutation of the embedding, so that the next
token depends strongly on the current one, and the residual updates of the decoder layers are
large enough to upset that rule often. The MTP head sees mainly the embedding of the last token
and so predicts the rule: some of its drafts are accepted and some are not, and greedy outputs
neither repeat nor lack near ties (see :mod:`vllm_b70.checkpoints.hardness`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from vllm_b70.checkpoints.errors import CheckpointError
from vllm_b70.checkpoints.pack import (
    QuantizedWeight,
    pack_compressed_tensors,
    pack_gptq,
    quantize,
)

Format = Literal["ct", "gptq", "bf16"]
ShapeName = Literal["9b", "27b"]
FloatName = Literal["bfloat16", "float16"]


@dataclass(frozen=True)
class TinyShape:
    """Dimensions of a tiny Qwen3.5 model. Every projection's input size is a multiple of 128."""

    heads: int
    kv_heads: int
    linear_key_heads: int
    linear_value_heads: int
    intermediate: int
    hidden: int = 256
    layers: int = 4
    vocab: int = 1024
    head_dim: int = 64
    linear_head_dim: int = 64
    conv_kernel: int = 4
    max_positions: int = 4096

    @property
    def linear_key_dim(self) -> int:
        """Width of all GDN keys (and of all GDN queries)."""
        return self.linear_key_heads * self.linear_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Width of all GDN values."""
        return self.linear_value_heads * self.linear_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the GDN convolution: queries, keys, values."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def layer_types(self) -> list[str]:
        """Three GDN layers, then one of full attention, repeated."""
        return [
            "full_attention" if index % 4 == 3 else "linear_attention"
            for index in range(self.layers)
        ]


SHAPES: Mapping[ShapeName, TinyShape] = {
    "9b": TinyShape(
        heads=8, kv_heads=2, linear_key_heads=2, linear_value_heads=4, intermediate=512
    ),
    "27b": TinyShape(
        heads=12, kv_heads=2, linear_key_heads=2, linear_value_heads=6, intermediate=768
    ),
}

_DTYPES: Mapping[FloatName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Order as in the ignore list of the published W4A16 checkpoint.
_GDN_PROJECTIONS = ("out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_GDN_SMALL = ("in_proj_b", "in_proj_a")

_ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

_MIX = 1.5
_MTP_MIX = 0.3
"""Size of the residual updates relative to the stream: large in the target, small in the draft."""

_ROTARY_FRACTION = 0.5

# Tiny vision tower; only its names and shapes matter.
_VISION_HIDDEN = 64
_VISION_INTERMEDIATE = 128
_VISION_POSITIONS = 64
_VISION_PATCH = 16
_VISION_TEMPORAL = 2
_VISION_MERGE = 2

_VISION_TOKENS = ("<|vision_end|>", "<|vision_start|>", "<|video_pad|>", "<|image_pad|>")
_EOS = "<|endoftext|>"


def make_tiny(
    directory: Path,
    *,
    format: Format,
    shape: ShapeName,
    seed: int = 0,
    conditional: bool = False,
    group_size: int = 32,
    mtp: bool = True,
    dtype: FloatName = "bfloat16",
    desc_act: bool = False,
) -> None:
    """Write a seeded random checkpoint. Equal arguments give equal bytes on disk.

    Files: ``model.safetensors``, ``config.json``, ``generation_config.json``, ``tokenizer.json``,
    ``tokenizer_config.json``, and ``preprocessor_config.json`` for the conditional form. The
    weights before quantisation depend on ``seed`` and ``shape`` only.

    Args:
        directory: target; it must not exist or be empty. It appears complete or not at all.
        format: ``ct`` (compressed-tensors pack-quantized), ``gptq`` or ``bf16`` (no INT4; A_log
            and the GDN norm are float32 there, as in the unquantised originals).
        shape: dimensions and set of INT4 modules, see the module docstring.
        seed: seed of the weights.
        conditional: ``Qwen3_5ForConditionalGeneration`` with a tiny vision tower rather than
            ``Qwen3_5ForCausalLM``.
        group_size: group along K: a divisor of 128, or -1 for channelwise.
        mtp: whether to include the MTP head.
        dtype: dtype of every float tensor (but see ``bf16``), scales included.
        desc_act: quantise with group act-order and store ``g_idx``. Such a checkpoint is valid
            but not supported by vLLM; it serves as a bad input.

    Raises:
        CheckpointError: the target exists and is not empty, or the disk is full.
        ValueError: an argument, or a combination of arguments, makes no sense.
    """
    if format not in ("ct", "gptq", "bf16"):
        raise ValueError(f"unknown format {format!r}: use ct, gptq or bf16")
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}: use one of {', '.join(SHAPES)}")
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: use bfloat16 or float16")
    if group_size != -1 and (group_size <= 0 or 128 % group_size):
        raise ValueError(f"group size {group_size} must be -1 or a divisor of 128")
    if desc_act and (format == "bf16" or group_size == -1):
        raise ValueError("act-order needs an INT4 format and a group size other than -1")
    target = directory.resolve()
    _require_absent_or_empty(target)

    tensors = _checkpoint_tensors(
        format, shape, seed, conditional, group_size, mtp, _DTYPES[dtype], desc_act
    )
    config = _config(format, shape, conditional, group_size, mtp, dtype, desc_act)
    dims = SHAPES[shape]
    files = {
        "config.json": _json(config),
        "generation_config.json": _json({"eos_token_id": 0, "pad_token_id": 0}),
        "model.safetensors": save(tensors, metadata={"format": "pt"}),
        "tokenizer.json": (_tokenizer(dims.vocab).to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": _json(_tokenizer_config(dims, conditional)),
    }
    if conditional:
        files["preprocessor_config.json"] = _json(_preprocessor_config())
    _write_directory(target, files)


def int4_modules(
    format: Format, shape: ShapeName, *, conditional: bool = False, mtp: bool = True
) -> frozenset[str]:
    """Names of the modules that :func:`make_tiny` stores as INT4, as spelt in the checkpoint."""
    if format == "bf16":
        return frozenset()
    return frozenset(
        _checkpoint_name(module, conditional)
        for module in _linear_modules(SHAPES[shape], mtp)
        if _is_int4(module, shape)
    )


# --- which modules there are --------------------------------------------------------------


def _linear_modules(dims: TinyShape, mtp: bool) -> Iterator[str]:
    """Every linear layer but the LM head, spelt as in the causal form."""
    for index, layer_type in enumerate(dims.layer_types):
        layer = f"model.layers.{index}"
        if layer_type == "linear_attention":
            yield from (f"{layer}.linear_attn.{name}" for name in _GDN_PROJECTIONS)
        else:
            yield from (f"{layer}.self_attn.{name}" for name in _ATTENTION_PROJECTIONS)
        yield from (f"{layer}.mlp.{name}" for name in _MLP_PROJECTIONS)
    if mtp:
        yield "mtp.fc"
        yield from (f"mtp.layers.0.self_attn.{name}" for name in _ATTENTION_PROJECTIONS)
        yield from (f"mtp.layers.0.mlp.{name}" for name in _MLP_PROJECTIONS)


def _is_int4(module: str, shape: ShapeName) -> bool:
    """Whether a quantised checkpoint stores this linear layer (causal spelling) as INT4."""
    parts = module.split(".")
    if module in ("lm_head", "mtp.fc") or parts[-1] in _GDN_SMALL:
        return False
    if parts[0] == "mtp" or "linear_attn" in parts:
        return shape == "27b"
    return "self_attn" in parts or "mlp" in parts


def _checkpoint_name(name: str, conditional: bool) -> str:
    if conditional and name.startswith("model."):
        return "model.language_model." + name.removeprefix("model.")
    return name


# --- weights ------------------------------------------------------------------------------


class _Random:
    """Random float32 tensors addressed by name.

    Each tensor has a generator of its own, so that none depends on which others exist. Only raw
    generator words and exact arithmetic are used: torch's samplers may differ between CPUs in
    the last bit, and neither they nor numpy's promise the same values in every version.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def _words(self, name: str, count: int) -> NDArray[np.uint64]:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        words = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(count)
        return np.asarray(words, dtype="<u8")

    def normal(self, name: str, size: tuple[int, ...], std: float) -> Tensor:
        """Approximately normal values: each is the sum of twelve uniform 16-bit numbers."""
        words = self._words(name, 3 * math.prod(size)).view("<u2").reshape(-1, 12)
        centred = words.sum(1, dtype=np.int64) - 12 * ((1 << 16) - 1) / 2
        values = (centred * (std / (1 << 16))).astype(np.float32)
        return torch.from_numpy(values.reshape(size))

    def uniform(self, name: str, size: tuple[int, ...], low: float, high: float) -> Tensor:
        fractions = (self._words(name, math.prod(size)) >> np.uint64(40)) / (1 << 24)
        values = (fractions * (high - low) + low).astype(np.float32)
        return torch.from_numpy(values.reshape(size))

    def permutation(self, name: str, size: int) -> Tensor:
        return torch.from_numpy(np.argsort(self._words(name, size), kind="stable"))

    def linear(self, name: str, out_size: int, in_size: int, gain: float = 1.0) -> Tensor:
        """Weight [out, in] that maps unit-variance input to a standard deviation of ``gain``."""
        return self.normal(name, (out_size, in_size), gain / math.sqrt(in_size))


def _text_weights(dims: TinyShape, seed: int, mtp: bool) -> dict[str, Tensor]:
    """Float32 weights of the language model and MTP head, spelt as in the causal form."""
    rng = _Random(seed)
    hidden, vocab = dims.hidden, dims.vocab
    weights: dict[str, Tensor] = {}

    def norm(name: str, size: int, std: float) -> None:
        # Qwen3.5 norms store the deviation from 1.
        weights[f"{name}.weight"] = rng.normal(name, (size,), std)

    def linear(name: str, out_size: int, in_size: int, gain: float = 1.0) -> None:
        weights[f"{name}.weight"] = rng.linear(name, out_size, in_size, gain)

    def decoder_layer(name: str, layer_type: str, mix: float) -> None:
        norm(f"{name}.input_layernorm", hidden, 0.1)
        norm(f"{name}.post_attention_layernorm", hidden, 0.1)
        if layer_type == "full_attention":
            attention = f"{name}.self_attn"
            width = dims.heads * dims.head_dim
            kv_width = dims.kv_heads * dims.head_dim
            linear(f"{attention}.q_proj", 2 * width, hidden)  # queries and output gates
            linear(f"{attention}.k_proj", kv_width, hidden)
            linear(f"{attention}.v_proj", kv_width, hidden)
            # Averaging over positions and the gate shrink the values; the gain makes up for it.
            linear(f"{attention}.o_proj", hidden, width, 3.0 * mix)
            norm(f"{attention}.q_norm", dims.head_dim, 0.1)
            norm(f"{attention}.k_norm", dims.head_dim, 0.1)
        else:
            gdn_layer(f"{name}.linear_attn", mix)
        linear(f"{name}.mlp.gate_proj", dims.intermediate, hidden)
        linear(f"{name}.mlp.up_proj", dims.intermediate, hidden)
        linear(f"{name}.mlp.down_proj", hidden, dims.intermediate, 2.2 * mix)

    def gdn_layer(name: str, mix: float) -> None:
        values = dims.linear_value_heads
        linear(f"{name}.in_proj_qkv", dims.conv_dim, hidden)
        linear(f"{name}.in_proj_z", dims.linear_value_dim, hidden)
        linear(f"{name}.in_proj_b", values, hidden)
        linear(f"{name}.in_proj_a", values, hidden)
        weights[f"{name}.conv1d.weight"] = rng.normal(
            f"{name}.conv1d", (dims.conv_dim, 1, dims.conv_kernel), 0.6
        )
        # Decay rates from almost none to a few tokens, so that the state holds long histories.
        weights[f"{name}.A_log"] = rng.uniform(f"{name}.A_log", (values,), 0.05, 4.05).log()
        weights[f"{name}.dt_bias"] = rng.normal(f"{name}.dt_bias", (values,), 0.5) - 2.0
        # Unlike the other norms this one stores the factor itself.
        weights[f"{name}.norm.weight"] = 1.0 + rng.normal(
            f"{name}.norm", (dims.linear_head_dim,), 0.1
        )
        linear(f"{name}.out_proj", hidden, dims.linear_value_dim, 1.7 * mix)

    embedding = rng.normal("embed_tokens", (vocab, hidden), 1.0)
    weights["model.embed_tokens.weight"] = embedding
    head = torch.empty_like(embedding)
    head[rng.permutation("permutation", vocab)] = embedding / math.sqrt(hidden)
    weights["lm_head.weight"] = head + rng.linear("lm_head", vocab, hidden, 0.2)
    for index, layer_type in enumerate(dims.layer_types):
        decoder_layer(f"model.layers.{index}", layer_type, _MIX)
    norm("model.norm", hidden, 0.05)
    if mtp:
        # Input is [embedding of the last token, hidden state of the target].
        identity = torch.eye(hidden)
        weights["mtp.fc.weight"] = torch.cat([identity, 0.3 * identity], 1) + rng.normal(
            "mtp.fc", (hidden, 2 * hidden), 0.1 / math.sqrt(hidden)
        )
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            norm(f"mtp.{name}", hidden, 0.02)
        decoder_layer("mtp.layers.0", "full_attention", _MTP_MIX)
    return weights


def _vision_weights(out_size: int, seed: int) -> dict[str, Tensor]:
    """Float32 weights of the vision tower, named as in the conditional form."""
    rng = _Random(seed)
    width, merged = _VISION_HIDDEN, _VISION_HIDDEN * _VISION_MERGE**2
    prefix = "model.visual"
    weights: dict[str, Tensor] = {
        f"{prefix}.patch_embed.proj.weight": rng.normal(
            "visual.patch_embed", (width, 3, _VISION_TEMPORAL, _VISION_PATCH, _VISION_PATCH), 0.02
        ),
        f"{prefix}.patch_embed.proj.bias": torch.zeros(width),
        f"{prefix}.pos_embed.weight": rng.normal(
            "visual.pos_embed", (_VISION_POSITIONS, width), 0.02
        ),
    }
    for name in ("blocks.0.norm1", "blocks.0.norm2", "merger.norm"):
        weights[f"{prefix}.{name}.weight"] = torch.ones(width)
        weights[f"{prefix}.{name}.bias"] = torch.zeros(width)
    sizes = (
        (3 * width, width),
        (width, width),
        (_VISION_INTERMEDIATE, width),
        (width, _VISION_INTERMEDIATE),
        (merged, merged),
        (out_size, merged),
    )
    for module, (out_features, in_features) in zip(_vision_modules(), sizes, strict=True):
        weights[f"{module}.weight"] = rng.linear(module, out_features, in_features)
        weights[f"{module}.bias"] = torch.zeros(out_features)
    return weights


def _vision_modules() -> tuple[str, ...]:
    return tuple(
        f"model.visual.{name}"
        for name in (
            "blocks.0.attn.qkv",
            "blocks.0.attn.proj",
            "blocks.0.mlp.linear_fc1",
            "blocks.0.mlp.linear_fc2",
            "merger.linear_fc1",
            "merger.linear_fc2",
        )
    )


def _checkpoint_tensors(
    format: Format,
    shape: ShapeName,
    seed: int,
    conditional: bool,
    group_size: int,
    mtp: bool,
    dtype: torch.dtype,
    desc_act: bool,
) -> dict[str, Tensor]:
    """All tensors as they are stored."""
    dims = SHAPES[shape]
    stored: dict[str, Tensor] = {}
    for name, weight in _text_weights(dims, seed, mtp).items():
        module = name.removesuffix(".weight")
        out_name = _checkpoint_name(name, conditional)
        if format == "bf16" or not _is_int4(module, shape) or weight.ndim != 2:
            rounded = weight.to(dtype)
            if format == "bf16" and name.endswith((".A_log", ".linear_attn.norm.weight")):
                rounded = rounded.to(torch.float32)
            stored[out_name] = rounded
            continue
        order = None
        if desc_act:
            order = _Random(seed).permutation(f"{module}.order", weight.shape[1])
        packed = _pack(format, weight, group_size, dtype, order)
        out_module = out_name.removesuffix(".weight")
        stored.update({f"{out_module}.{suffix}": tensor for suffix, tensor in packed.items()})
    if conditional:
        vision = _vision_weights(dims.hidden, seed)
        stored.update({name: weight.to(dtype) for name, weight in vision.items()})
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def _pack(
    format: Format, weight: Tensor, group_size: int, dtype: torch.dtype, order: Tensor | None
) -> dict[str, Tensor]:
    """Quantise and pack one weight [N, K]; ``order`` [K] is the act-order permutation, if any."""
    if order is None:
        quantized = quantize(weight, group_size, scale_dtype=dtype)
    else:
        in_order = quantize(weight[:, order], group_size, scale_dtype=dtype)
        codes = torch.empty_like(in_order.codes)
        codes[:, order] = in_order.codes
        quantized = QuantizedWeight(codes, in_order.scales)
    packed = pack_gptq(quantized) if format == "gptq" else pack_compressed_tensors(quantized)
    if order is not None:
        groups = torch.empty_like(order)
        groups[order] = torch.arange(order.numel()) // group_size
        packed["g_idx" if format == "gptq" else "weight_g_idx"] = groups.to(torch.int32)
    return packed


# --- configuration ------------------------------------------------------------------------


def _config(
    format: Format,
    shape: ShapeName,
    conditional: bool,
    group_size: int,
    mtp: bool,
    dtype: FloatName,
    desc_act: bool,
) -> dict[str, Any]:
    dims = SHAPES[shape]
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": _ROTARY_FRACTION,
    }
    if conditional:
        # The sections share out half of the rotary dimension.
        half = int(dims.head_dim * _ROTARY_FRACTION) // 2
        side = half // 3
        rope |= {"mrope_interleaved": True, "mrope_section": [half - 2 * side, side, side]}
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": 0,
        "full_attention_interval": 4,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "initializer_range": 0.02,
        "intermediate_size": dims.intermediate,
        "layer_types": dims.layer_types,
        "linear_conv_kernel_dim": dims.conv_kernel,
        "linear_key_head_dim": dims.linear_head_dim,
        "linear_num_key_heads": dims.linear_key_heads,
        "linear_num_value_heads": dims.linear_value_heads,
        "linear_value_head_dim": dims.linear_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": dims.max_positions,
        "mtp_num_hidden_layers": 1 if mtp else 0,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": dims.heads,
        "num_hidden_layers": dims.layers,
        "num_key_value_heads": dims.kv_heads,
        "pad_token_id": 0,
        "partial_rotary_factor": _ROTARY_FRACTION,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": dims.vocab,
    }
    if conditional:
        config: dict[str, Any] = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "dtype": dtype,
            "image_token_id": dims.vocab - 1,
            "video_token_id": dims.vocab - 2,
            "vision_start_token_id": dims.vocab - 3,
            "vision_end_token_id": dims.vocab - 4,
            "text_config": text,
            "tie_word_embeddings": False,
            "vision_config": {
                "model_type": "qwen3_5_vision",
                "deepstack_visual_indexes": [],
                "depth": 1,
                "dtype": dtype,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": _VISION_HIDDEN,
                "in_channels": 3,
                "initializer_range": 0.02,
                "intermediate_size": _VISION_INTERMEDIATE,
                "num_heads": 2,
                "num_position_embeddings": _VISION_POSITIONS,
                "out_hidden_size": dims.hidden,
                "patch_size": _VISION_PATCH,
                "spatial_merge_size": _VISION_MERGE,
                "temporal_patch_size": _VISION_TEMPORAL,
            },
        }
    else:
        config = {"architectures": ["Qwen3_5ForCausalLM"], **text}
    if format == "ct":
        config["quantization_config"] = _ct_config(shape, conditional, group_size, mtp, desc_act)
    elif format == "gptq":
        config["quantization_config"] = _gptq_config(shape, conditional, group_size, mtp, desc_act)
    return config


def _ct_config(
    shape: ShapeName, conditional: bool, group_size: int, mtp: bool, desc_act: bool
) -> dict[str, Any]:
    """compressed-tensors configuration; the ignore list names modules one by one."""
    ignore = list(_vision_modules()) if conditional else []
    ignore += [
        _checkpoint_name(module, conditional)
        for module in _linear_modules(SHAPES[shape], mtp=False)
        if not _is_int4(module, shape)
    ]
    ignore.append("lm_head")
    if mtp:
        # vLLM builds the draft with names that begin with "mtp." and rewrites plain entries, but
        # not regular expressions, with the target model's name map.
        ignore.append("re:^mtp.*" if shape == "9b" else r"re:^mtp\.fc$")
    channelwise = group_size == -1
    actorder = "group" if desc_act else "static"
    return {
        "config_groups": {
            "group_0": {
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    # act-order is defined for the group strategy only
                    "actorder": None if channelwise else actorder,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": None if channelwise else group_size,
                    "num_bits": 4,
                    "observer": "memoryless_minmax",
                    "observer_kwargs": {},
                    "scale_dtype": None,
                    "strategy": "channel" if channelwise else "group",
                    "symmetric": True,
                    "type": "int",
                    "zp_dtype": None,
                },
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.14.1",
    }


def _gptq_config(
    shape: ShapeName, conditional: bool, group_size: int, mtp: bool, desc_act: bool
) -> dict[str, Any]:
    """GPTQ configuration; "-:" keys are regular expressions of modules that stay 16-bit.

    vLLM matches the keys, anchored at the start, against its own module names. Those have other
    prefixes than the checkpoint, and fused names (``in_proj_ba`` for ``in_proj_b`` with
    ``in_proj_a``) that are not resolved to their parts.
    """
    dynamic: dict[str, dict[str, Any]] = {}
    if shape == "9b":
        dynamic[r"-:.*\.linear_attn\..*"] = {}
        if mtp:
            dynamic[r"-:(.*\.)?mtp\..*"] = {}
    else:
        dynamic[r"-:.*\.in_proj_(a|b|ba)$"] = {}
        if mtp:
            # A "-:" key that contains the letters of the head's name makes vLLM build all draft
            # layers unquantised, so the name is spelt with a character class.
            dynamic[r"-:(.*\.)?m[t]p\.fc$"] = {}
    if conditional:
        dynamic[r"-:(.*\.)?visual\..*"] = {}
    return {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": desc_act,
        "dynamic": dynamic,
        "group_size": group_size,
        "lm_head": False,
        "quant_method": "gptq",
        "sym": True,
    }


# --- tokenizer ----------------------------------------------------------------------------


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte 0..255 that byte-level BPE uses."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level tokenizer: id 0 ends the text, id b + 1 is byte b, the rest is reserved."""
    vocab = {_EOS: 0}
    vocab.update({character: byte + 1 for byte, character in enumerate(_byte_alphabet())})
    first_vision = vocab_size - len(_VISION_TOKENS)
    vocab.update({f"<|reserved_{index}|>": index for index in range(257, first_vision)})
    vocab.update({token: first_vision + index for index, token in enumerate(_VISION_TOKENS)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (_EOS, *_VISION_TOKENS)]
    )
    return tokenizer


def _tokenizer_config(dims: TinyShape, conditional: bool) -> dict[str, Any]:
    return {
        # The processor of the conditional form insists on the tokenizer class of its family.
        "tokenizer_class": "Qwen2Tokenizer" if conditional else "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": _EOS,
        "image_token": "<|image_pad|>",
        "model_max_length": dims.max_positions,
        "pad_token": _EOS,
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": _VISION_MERGE,
        "patch_size": _VISION_PATCH,
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": 65536, "shortest_edge": 4096},
        "temporal_patch_size": _VISION_TEMPORAL,
    }


# --- writing ------------------------------------------------------------------------------


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _require_absent_or_empty(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(
            f"{target} is a file, which a checkpoint directory cannot replace; "
            "choose another path or remove it."
        )
    if any(target.iterdir()):
        raise CheckpointError(
            f"{target} is not empty, and nothing in it shall be overwritten; "
            "choose another path or remove it."
        )


def _write_directory(target: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` to a temporary sibling of ``target`` and rename it into place."""
    needed = sum(len(content) for content in files.values())
    created = [parent for parent in target.parents if not parent.exists()]
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        for name, content in files.items():
            _write_file(temporary / name, content)
        _require_absent_or_empty(target)
        os.rename(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in created:  # innermost first; one that gained other content stays
            try:
                parent.rmdir()
            except OSError:
                break
        if isinstance(error, OSError):
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CheckpointError(
                    f"No space left to write {target}, which needs {needed} bytes; "
                    "free some space or choose another directory."
                ) from error
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise CheckpointError(
                    f"{target} was filled by somebody else while it was being written; "
                    "choose another path or remove it."
                ) from error
        raise


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        # Some file systems report a full disk only when the data really goes out.
        os.fsync(file.fileno())
