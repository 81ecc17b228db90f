"""Whether a model fits, from its configuration and the headers of its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_b70.checkpoints.check import check_checkpoint, has_mtp_head, weight_bytes
from vllm_b70.checkpoints.errors import CheckpointError
from vllm_b70.doctor.devices import GIB, free_memory, kind
from vllm_b70.doctor.finding import Finding, Severity

#: vLLM's default share of a card (--gpu-memory-utilization).
SHARE = 0.92


@dataclass(frozen=True)
class Load:
    """What is to be served.

    Attributes:
        users: Requests at once.
        depth: Drafts a step, 0 for no speculation.
        tokens: Tokens of a request, prompt and output.
        cards: Tensor parallel size.
    """

    users: int
    depth: int
    tokens: int
    cards: int


def kv_bytes(config: dict[str, Any], load: Load) -> int:
    """Keys and values of every request on one card; the draft layer has its own."""
    layers = config["layer_types"].count("full_attention") + (load.depth > 0)
    heads = max(1, config["num_key_value_heads"] // load.cards)
    return 2 * 2 * layers * heads * config["head_dim"] * load.users * load.tokens


def state_bytes(config: dict[str, Any], load: Load) -> int:
    """States in fp32 and histories in 16 bits on one card: a slot a token that a step may verify,
    and a history that reaches back over the drafts."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"] // load.cards
    heads = config["linear_num_value_heads"] // load.cards
    values = heads * config["linear_value_head_dim"]
    state = 4 * values * config["linear_key_head_dim"]
    history = 2 * (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1 + load.depth)
    layers = config["layer_types"].count("linear_attention")
    return layers * (state + history) * load.users * (1 + load.depth)


def check(directory: Path, load: Load) -> Iterator[Finding]:
    """The checkpoint's form, and its memory against what is free."""

    def found(what: str, severity: Severity, text: str, remedy: str = "") -> Finding:
        return Finding("memory", what, severity, text, remedy)

    try:
        check_checkpoint(directory)
        head = has_mtp_head(directory)
        weights = weight_bytes(directory) // load.cards
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        parts = {
            "weights": weights,
            "KV cache": kv_bytes(config, load),
            "recurrent state": state_bytes(config, load),
        }
    except (CheckpointError, OSError, KeyError) as error:
        text = f"{type(error).__name__}: {error}"
        yield found("checkpoint", Severity.error, text, "use a Qwen3.5 checkpoint")
        return
    yield found("checkpoint", Severity.ok, "nothing wrong found in its headers")
    if load.depth and not head:
        yield found("MTP head", Severity.error, "no mtp.* tensors", "serve without speculation")
    for name, size in parts.items():
        yield found(name, Severity.ok, f"{size / GIB:.2f} GiB a card")
    free = min(free for free, _ in free_memory(kind())[: load.cards])
    need = sum(parts.values())
    fits = Severity.ok if need < SHARE * free else Severity.warning
    yield found(
        "fits",
        fits if need < free else Severity.error,
        f"{need / GIB:.2f} GiB of {free / GIB:.2f} GiB free a card, before activations and graphs; "
        f"{load.users} users, {load.tokens} tokens each, {load.depth} drafts",
        "" if fits is Severity.ok else "fewer users, tokens or drafts, or more cards",
    )
