"""Qwen's gated delta net by one rule: the position of a token picks its arithmetic.

A token inside the prompt is computed by vLLM's chunked kernel, on the chunk grid. Any other token
is computed by the recurrent kernel, one token at a time, however many share a step: decode,
verification of drafts and replay after preemption are the same call. Both get their inputs from one
convolution. This file has the layer, and its step on the CPU, where each prompt chunk is a call of
its own; ``gated_delta_net_device`` has the step on a GPU.

Official seams: the out-of-tree class of the layer, and the attention backend that it names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as vllm_ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadataBuilder,
)

from vllm_b70.chunk_grid import check_chunk
from vllm_b70.compat.seams import require
from vllm_b70.layers.state_columns import StateColumns
from vllm_b70.ops import gated_delta_rule as ops
from vllm_b70.ops import library

require("gdn_forward", "gdn_forward_cuda", "gdn_forward_xpu", "gdn_builder", "attention_metadata")


@dataclass(frozen=True)
class PromptChunk:
    """One request's prompt tokens of this step.

    Attributes:
        first, last: Its rows of the batch, last excluded.
        start: Position of its first token; 0 means that it has no earlier state.
        slot: The state slot it works in.
    """

    first: int
    last: int
    start: int
    slot: int


@dataclass
class StepPlan:
    """What one step does to the recurrent state: the metadata of our backend.

    Attributes:
        prompts: Prompt chunks.
        rows: [T] int64, rows of the batch past their prompt.
        starts: [S + 1] int64, where each request starts in ``rows``.
        read: [S] int64, the slot of each request's state before its first row.
        write: [T] int64, the slot for the state after each row, or -1.
    """

    prompts: list[PromptChunk] = field(default_factory=list)
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    read: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    write: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def history_sources(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the convolution's history after each kept row comes from.

        Args:
            window: Inputs of a history, W - 1.

        Returns:
            Slots [n] int64 and, for each, [n, window] int64 indices into the concatenation of all
            requests' old histories, [S * window], and ``rows``.
        """
        kept = np.flatnonzero(self.write >= 0)
        sequence = np.searchsorted(self.starts, kept, side="right") - 1
        # Index of a row relative to its request, oldest input of the window first.
        source = (kept - self.starts[sequence])[:, None] + np.arange(1 - window, 1)
        old = sequence[:, None] * window + window + source
        new = len(self.read) * window + self.starts[sequence][:, None] + source
        return self.write[kept], np.where(source < 0, old, new)


def plan_step(
    columns: StateColumns,
    query_starts: list[int],
    seq_lens: list[int],
    slots: list[list[int]],
    in_prompt: list[bool],
) -> StepPlan:
    """Classify the requests of a step by position.

    Args:
        columns: The group's record of where states are kept; updated.
        query_starts: Where each request's rows start in the batch, and their end.
        seq_lens: Position after each request's last row.
        slots: Each request's state slots, column 0 first.
        in_prompt: Whether each request's first row lies inside its prompt.

    Raises:
        RuntimeError: A prompt chunk is off the grid or a state is gone.
    """
    plan = StepPlan()
    rows: list[int] = []
    starts, read, write = [0], [], []
    for request, (first, last) in enumerate(zip(query_starts, query_starts[1:], strict=False)):
        tokens = last - first
        if tokens == 0:
            continue
        start = seq_lens[request] - tokens
        if in_prompt[request]:
            check_chunk(start, tokens)
            slot = columns.prompt_chunk(slots[request], start, tokens)
            plan.prompts.append(PromptChunk(first, last, start, slot))
            continue
        source, targets = columns.advance(slots[request], start, tokens)
        rows.extend(range(first, last))
        starts.append(len(rows))
        read.append(source)
        write.extend(targets)
    plan.rows, plan.starts = np.array(rows, np.int64), np.array(starts, np.int64)
    plan.read, plan.write = np.array(read, np.int64), np.array(write, np.int64)
    return plan


class PositionalGDNBuilder(GDNAttentionMetadataBuilder):
    """Builds the step's plan from positions; vLLM's classification by neighbours is not used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_update_block_table = False
        self._columns = StateColumns()

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> StepPlan:
        m = common_attn_metadata
        assert m.is_prefilling is not None
        return plan_step(
            self._columns,
            m.query_start_loc_cpu.tolist(),
            m.seq_lens.tolist(),
            m.block_table_tensor[:, : self.num_spec + 1].tolist(),
            m.is_prefilling.tolist(),
        )


class PositionalGDNBackend(GDNAttentionBackend):
    """Names the builder to vLLM."""

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        if current_platform.is_cpu():
            return PositionalGDNBuilder
        from vllm_b70.layers.gated_delta_net_device import DeviceGDNBuilder

        return DeviceGDNBuilder


class RowInvariantGatedDeltaNet(QwenGatedDeltaNetAttention):
    """The layer with its core replaced; projections and norm are vLLM's."""

    def get_attn_backend(self) -> type[GDNAttentionBackend]:
        return PositionalGDNBackend

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.forward_native(hidden_states)

    def forward_cuda(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.forward_native(hidden_states)

    def forward_xpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.forward_native(hidden_states)

    def forward_native(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The layer on any device: projections, core, norm and output projection."""
        if self.gqa_interleaved_layout:
            raise NotImplementedError(
                "the exact route covers Qwen3.5's gated delta net, not the interleaved layout of "
                "Qwen3-Next: set VLLM_B70=0 for this model."
            )
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        mixed_qkv, z = qkvz.split(
            [self.conv_dim // self.tp_size, self.value_dim // self.tp_size], dim=-1
        )
        z = z.reshape(z.shape[0], -1, self.head_v_dim)
        b, a = self.split_ba(ba)
        # Zeros: the rows that pad a captured graph are not computed.
        core = torch.zeros(
            (hidden_states.shape[0], self.num_v_heads // self.tp_size, self.head_v_dim),
            dtype=hidden_states.dtype,
            device=hidden_states.device,
        )
        torch.ops.vllm_b70.gated_delta_net(mixed_qkv, b, a, core, self.prefix)
        return self._output_projection(core, z)

    def float_weights(self) -> dict[str, torch.Tensor]:
        """The small weights of the core in fp32, converted once."""
        if not hasattr(self, "_float_weights"):
            assert self.conv1d.bias is None, "Qwen's convolution has no bias"
            conv = self.conv1d.weight
            self._float_weights = {
                "conv": conv.data.view(conv.shape[0], conv.shape[2]).float().contiguous(),
                "a_log": self.A_log.data.float().contiguous(),
                "dt_bias": self.dt_bias.data.float().contiguous(),
            }
        return self._float_weights

    def split_heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, D] convolved inputs as q [T, HK, K], k [T, HK, K] and v [T, HV, V]."""
        keys = self.key_dim // self.tp_size
        q, k, v = mixed.split([keys, keys, self.value_dim // self.tp_size], dim=-1)
        return (
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
        )

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Histories [slots, W - 1, D] and states [slots, HV, K, V]: views of the KV cache."""
        conv, state = self.kv_cache
        if is_conv_state_dim_first():
            conv = conv.transpose(1, 2)
        slots, heads, values, keys = state.shape
        return conv[:, : self.conv_kernel_size - 1], state.view(slots, heads, keys, values)

    def device_caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Histories [slots, W - 1 or more, D] and states [slots, HV, V, K] on a GPU."""
        conv, state = self.kv_cache
        return conv.transpose(1, 2) if is_conv_state_dim_first() else conv, state


def run_prompt(
    layer: RowInvariantGatedDeltaNet,
    chunk: PromptChunk,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
) -> torch.Tensor:
    """One prompt chunk through the chunked kernel; [T, HV, V]."""
    weights = layer.float_weights()
    histories, states = layer.caches()
    if chunk.start == 0:
        # Whatever a former request left in the slot, NaN included, must not be read.
        histories[chunk.slot] = 0
        states[chunk.slot] = 0
    history = histories[chunk.slot : chunk.slot + 1]
    starts = np.array([0, mixed_qkv.shape[0]], np.int64)
    convolved = ops.causal_conv(mixed_qkv, history, weights["conv"], None, starts)
    histories[chunk.slot] = torch.cat([history[0], mixed_qkv])[-history.shape[1] :]
    q, k, v = layer.split_heads(convolved)
    decay, beta = ops.gates(a, b, weights["a_log"], weights["dt_bias"])
    out, _ = vllm_ops.chunk_gated_delta_rule_cpu(
        query=q.unsqueeze(0).contiguous(),
        key=k.unsqueeze(0).contiguous(),
        value=v.unsqueeze(0).contiguous(),
        g=decay.unsqueeze(0),
        beta=beta.to(mixed_qkv.dtype).unsqueeze(0),
        initial_state=states,
        output_final_state=True,
        cu_seqlens=torch.from_numpy(starts).int(),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=torch.tensor([chunk.slot], dtype=torch.int32),
    )
    return out.squeeze(0)


def run_recurrent(
    layer: RowInvariantGatedDeltaNet,
    plan: StepPlan,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
) -> torch.Tensor:
    """All rows past their prompt, token by token; [T, HV, V]."""
    weights = layer.float_weights()
    histories, states = layer.caches()
    history = histories[torch.from_numpy(plan.read)]
    convolved = ops.causal_conv(mixed_qkv, history, weights["conv"], None, plan.starts)
    slots, sources = plan.history_sources(history.shape[1])
    inputs = torch.cat([history.flatten(0, 1), mixed_qkv])
    histories[torch.from_numpy(slots)] = inputs[torch.from_numpy(sources)]
    q, k, v = layer.split_heads(convolved)
    decay, beta = ops.gates(a, b, weights["a_log"], weights["dt_bias"])
    return ops.gated_delta_rule(q, k, v, decay, beta, states, plan.starts, plan.read, plan.write)


def gated_delta_net(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, layer_name: str
) -> None:
    """Core of one gated-delta-net layer.

    Args:
        mixed_qkv: [T, D] projected queries, keys and values, before the convolution.
        b: [T, HV] write-gate inputs.
        a: [T, HV] decay inputs.
        out: [T, HV, V], filled but for rows that pad a captured graph; untouched while vLLM
            profiles without metadata.
        layer_name: The layer's name in vLLM's forward context.
    """
    context = get_forward_context()
    # While it profiles, vLLM has no metadata at all, or none for layers with a recurrent state.
    plan = (context.attn_metadata or {}).get(layer_name)
    if plan is None:
        device = mixed_qkv.device
        if device.type != "cpu" and torch.get_device_module(device).is_current_stream_capturing():
            raise RuntimeError(
                "a piecewise graph would hold the gated delta net without its metadata: "
                "set cudagraph_mode to FULL_DECODE_ONLY."
            )
        return
    layer = context.no_compile_layers[layer_name]
    if not isinstance(plan, StepPlan):
        from vllm_b70.layers.gated_delta_net_device import run_step

        run_step(layer, plan, mixed_qkv, b, a, out)
        return
    for chunk in plan.prompts:
        rows = slice(chunk.first, chunk.last)
        out[rows] = run_prompt(layer, chunk, mixed_qkv[rows], b[rows], a[rows])
    if len(plan.rows):
        index = torch.from_numpy(plan.rows)
        out[index] = run_recurrent(layer, plan, mixed_qkv[index], b[index], a[index])


def _fake(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, layer_name: str
) -> None:
    return None


library.define(
    "gated_delta_net(Tensor mixed_qkv, Tensor b, Tensor a, Tensor(a!) out, str layer_name) -> ()",
    gated_delta_net,
    _fake,
    devices=("CPU", "CUDA", "XPU"),
)


def register() -> None:
    """Let vLLM build our layer in place of its own."""
    QwenGatedDeltaNetAttention.register_oot(
        RowInvariantGatedDeltaNet, name="QwenGatedDeltaNetAttention"
    )
