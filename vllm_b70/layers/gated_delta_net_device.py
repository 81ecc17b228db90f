"""The gated delta net's step on a GPU: metadata by position, kernels by ``ops``.

What the host knows exactly is which rows are prompt chunks and where those begin. How many drafts
were accepted, and so where every other request stands, is known on the device alone when the step
is made: the slots to continue from are looked up there (``ops.state_columns``), without waiting.

A step is at most two pure calls: the chunked kernels over all prompt chunks, one sequence a
request, and the recurrent kernels over all other rows. A captured graph holds the second only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.third_party.flash_linear_attention.ops.chunk import chunk_gated_delta_rule_fwd
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from vllm_b70.chunk_grid import GRID, check_chunk
from vllm_b70.compat.seams import require
from vllm_b70.ops.prompt_inputs import PromptSequences, prompt_inputs
from vllm_b70.ops.recurrent_steps import recurrent_steps
from vllm_b70.ops.state_columns import StateRecord, place_states

if TYPE_CHECKING:
    from vllm_b70.layers.gated_delta_net import RowInvariantGatedDeltaNet

require("gdn_builder", "gdn_capture", "gdn_chunk_forward", "attention_metadata")


@dataclass(frozen=True)
class PromptLayout:
    """The prompt chunks of a step as the host sees them.

    Attributes:
        requests: Rows of the request table, in batch order.
        sources: First batch row of each.
        starts: Where each begins among all prompt rows; one more than there are chunks.
        positions: Position of each one's first token.
        chunks: The sequence and the number of each block of 64 tokens.
        offsets: Blocks before each sequence; one more than there are chunks.
    """

    requests: list[int]
    sources: list[int]
    starts: list[int]
    positions: list[int]
    chunks: list[tuple[int, int]]
    offsets: list[int]

    @property
    def tokens(self) -> int:
        """Prompt rows of the step."""
        return self.starts[-1]

    def rows(self) -> slice | list[int]:
        """The prompt rows of the batch, in order; a slice if they stand together."""
        last = self.sources[0]
        for source, first, end in zip(self.sources, self.starts, self.starts[1:], strict=False):
            if source != last:
                break
            last = source + end - first
        else:
            return slice(self.sources[0], last)
        pieces = zip(self.sources, self.starts, self.starts[1:], strict=False)
        return [row for s, first, end in pieces for row in range(s, s + end - first)]


def lay_out_prompts(
    query_starts: Sequence[int], ends: Sequence[int], in_prompt: Sequence[bool]
) -> PromptLayout | None:
    """Find the prompt chunks of a step.

    Args:
        query_starts: Where each request's rows start in the batch, and their end.
        ends: Position after each request's last row; exact for prompt chunks.
        in_prompt: Whether each request's first row lies inside its prompt.

    Returns:
        The chunks, or None when there are none.

    Raises:
        RuntimeError: A chunk begins off the grid.
    """
    layout = PromptLayout([], [], [0], [], [], [0])
    for request, (first, last) in enumerate(zip(query_starts, query_starts[1:], strict=False)):
        tokens = last - first
        if tokens == 0 or not in_prompt[request]:
            continue
        position = ends[request] - tokens
        check_chunk(position, tokens)
        blocks = -(-tokens // GRID)
        layout.chunks.extend((len(layout.requests), i) for i in range(blocks))
        layout.requests.append(request)
        layout.sources.append(first)
        layout.starts.append(layout.starts[-1] + tokens)
        layout.positions.append(position)
        layout.offsets.append(layout.offsets[-1] + blocks)
    return layout if layout.requests else None


@dataclass(frozen=True)
class PlacedPrompts:
    """A ``PromptLayout`` on the device, as far as it is the same for every group of layers.

    Attributes:
        layout: What the host sees.
        rows: The prompt rows of the batch, a slice or their indices.
        in_prompt: [R] int32, 1 for a prompt chunk.
        requests, sources, starts, offsets: As the layout's, int32.
        chunks: [blocks, 2] int32, as the layout's.
        resumed: [N] int32, 1, or 0 where the sequence begins here.
    """

    layout: PromptLayout
    rows: slice | torch.Tensor
    in_prompt: torch.Tensor
    requests: torch.Tensor
    sources: torch.Tensor
    starts: torch.Tensor
    offsets: torch.Tensor
    chunks: torch.Tensor
    resumed: torch.Tensor


def copy_together(
    arrays: Sequence[Sequence[int] | np.ndarray], device: torch.device
) -> list[torch.Tensor]:
    """Arrays of integers on the device by one copy, which the host does not wait for.

    Args:
        arrays: Integers that fit 32 bits, of one dimension each.
        device: Where to.

    Returns:
        Each as int32, from a multiple of 16 bytes on: kernels are compiled once more for a pointer
        that is off it.
    """
    first = [0]
    for array in arrays:
        first.append(first[-1] + -(-len(array) // 4) * 4)
    host = np.zeros(first[-1], np.int32)
    for at, array in zip(first, arrays, strict=False):
        host[at : at + len(array)] = array
    there = async_tensor_h2d(host, device=device, dtype=torch.int32)
    return [there[at : at + len(array)] for at, array in zip(first, arrays, strict=False)]


# Every group of layers builds its plan of the same step: only the first one copies.
@functools.lru_cache(maxsize=1)
def place_prompts(
    query_starts: tuple[int, ...],
    ends: tuple[int, ...],
    in_prompt: tuple[bool, ...],
    device: torch.device,
) -> PlacedPrompts | None:
    """``lay_out_prompts``, and what it found on the device; the same arguments and errors."""
    layout = lay_out_prompts(query_starts, ends, in_prompt)
    if layout is None:
        return None
    rows = layout.rows()
    flags, requests, sources, starts, offsets, chunks, resumed, indices = copy_together(
        [
            in_prompt,
            layout.requests,
            layout.sources,
            layout.starts,
            layout.offsets,
            np.array(layout.chunks, np.int32).ravel(),
            [int(position > 0) for position in layout.positions],
            [] if isinstance(rows, slice) else rows,
        ],
        device,
    )
    return PlacedPrompts(
        layout=layout,
        rows=rows if isinstance(rows, slice) else indices.long(),
        in_prompt=flags,
        requests=requests,
        sources=sources,
        starts=starts,
        offsets=offsets,
        chunks=chunks.view(-1, 2),
        resumed=resumed,
    )


@dataclass
class PromptCall:
    """All prompt chunks of a step, on the device.

    Attributes:
        sequences: What the kernels read.
        tokens: Prompt rows.
        rows: The prompt rows of the batch, a slice or their indices.
        offsets: [N + 1] int32, blocks of 64 tokens before each sequence.
        kept: [N, 1, 1, 1] bool, whether a sequence's state before it is in its slot.
        blank: [N, 1, 1, 1] fp32, what stands for it otherwise: 0, or NaN where it is lost.
    """

    sequences: PromptSequences
    tokens: int
    rows: slice | torch.Tensor
    offsets: torch.Tensor
    kept: torch.Tensor
    blank: torch.Tensor


@dataclass
class DevicePlan:
    """What one step does to the recurrent state: the metadata of our backend on a GPU.

    Attributes:
        prompts: The prompt chunks, or None.
        steps: Whether any row is past its prompt.
        starts: [R + 1] int32, where each request's rows start.
        read: [R] int32, the slot to continue from; 0 for prompt chunks and padding, -1 where the
            state is lost.
        table: [R, C] int32, where the states after the last C rows go.
    """

    prompts: PromptCall | None
    steps: bool
    starts: torch.Tensor
    read: torch.Tensor
    table: torch.Tensor


class DeviceGDNBuilder(GDNAttentionMetadataBuilder):
    """Builds the step's plan from positions, without waiting for the device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from vllm_b70.compat import fla_autotune, prompt_rows

        super().__init__(*args, **kwargs)
        # Here and not when the plugin registers: only workers make builders, and both patches
        # import what touches the device.
        fla_autotune.apply()
        prompt_rows.apply()
        self.supports_update_block_table = False
        self._record: StateRecord | None = None
        rows = self.vllm_config.scheduler_config.max_num_seqs
        like = {"dtype": torch.int32, "device": self.device}
        # Captured graphs read these.
        self._starts = torch.zeros(rows + 1, **like)
        self._read = torch.zeros(rows, **like)
        self._table = torch.zeros((rows, self.num_spec + 1), **like)
        self._lost = torch.zeros(1, dtype=torch.int32, pin_memory=is_pin_memory_available())

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> DevicePlan:
        m = common_attn_metadata
        requests = m.num_reqs
        self._check_lost()
        starts = m.query_start_loc_cpu[: requests + 1].tolist()
        assert m.seq_lens_cpu_upper_bound is not None
        prompts = None
        if m.is_prefilling is not None:
            prompts = place_prompts(
                tuple(starts),
                tuple(m.seq_lens_cpu_upper_bound.tolist()),
                tuple(m.is_prefilling.tolist()),
                self.device,
            )
        table = m.block_table_tensor[:requests, : self.num_spec + 1]
        plan = DevicePlan(
            prompts=None,
            steps=starts[-1] > (0 if prompts is None else prompts.layout.tokens),
            starts=self._starts[: requests + 1],
            read=self._read[:requests],
            table=self._table[:requests],
        )
        record = self._states()
        place_states(
            record,
            m.query_start_loc[: requests + 1],
            m.seq_lens[:requests],
            table,
            None if prompts is None else prompts.in_prompt,
            plan.starts,
            plan.read,
            plan.table,
        )
        self._lost.copy_(record.lost, non_blocking=True)
        if prompts is not None:
            plan.prompts = _prompt_call(prompts, table, plan.read)
        return plan

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> DevicePlan:
        return self.build(0, common_attn_metadata)

    def _states(self) -> StateRecord:
        """The group's record, as long as its cache has slots; made when the cache is there."""
        layers = self.vllm_config.compilation_config.static_forward_context
        slots = layers[self.layer_names[0]].kv_cache[1].shape[0]
        if self._record is None or len(self._record.first) != slots:
            self._record = StateRecord(slots, self.device)
        return self._record

    def record_states(self, slots: torch.Tensor, first: torch.Tensor, count: torch.Tensor) -> None:
        """Say which states some requests' slots hold, as ``StateRecord`` has it; ``graphs`` puts
        states where a step is to find them.

        Args:
            slots: [R] int64, the requests' slots of column 0.
            first, count: [R] integers, what to record for each.
        """
        record = self._states()
        record.first[slots] = first.to(record.first.dtype)
        record.count[slots] = count.to(record.count.dtype)

    def _check_lost(self) -> None:
        """Raise if an earlier step asked for a state that was not kept; it got NaN instead.

        The count arrives without waiting, so this may be a step late.
        """
        if int(self._lost[0]):
            raise RuntimeError(
                "the recurrent state before a step is gone: a request cannot be continued "
                "exactly; report this as a bug of vllm_b70."
            )


def _prompt_call(prompts: PlacedPrompts, table: torch.Tensor, read: torch.Tensor) -> PromptCall:
    """The prompt chunks for one group of layers, whose slots are in ``table``, and whose lost
    states in ``read``, as ``DevicePlan`` has them."""
    lost = read.index_select(0, prompts.requests) < 0
    return PromptCall(
        PromptSequences(
            sources=prompts.sources,
            starts=prompts.starts,
            slots=table[:, 0].index_select(0, prompts.requests).long(),
            resumed=prompts.resumed,
            chunks=prompts.chunks,
        ),
        prompts.layout.tokens,
        prompts.rows,
        prompts.offsets,
        # Resumed, and not lost.
        kept=(prompts.resumed > lost)[:, None, None, None],
        blank=torch.where(lost, float("nan"), 0.0)[:, None, None, None],
    )


def run_step(
    layer: RowInvariantGatedDeltaNet,
    plan: DevicePlan,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Core of one layer; arguments as for the op ``gated_delta_net``."""
    history, state = layer.device_caches()
    weight = layer.conv1d.weight.view(layer.conv1d.weight.shape[0], -1)
    key_heads = layer.key_dim // layer.tp_size // layer.head_k_dim
    inputs = (mixed_qkv, a, b, weight, layer.A_log, layer.dt_bias, history, state)
    if plan.prompts is not None:
        run_prompts(plan.prompts, *inputs, out, key_heads)
    if plan.steps:
        recurrent_steps(*inputs, plan.starts, plan.read, plan.table, out, key_heads)


def run_prompts(
    call: PromptCall,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    history: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    key_heads: int,
) -> None:
    """All prompt chunks of a step through the chunked kernels, each a sequence of its own;
    arguments as for ``recurrent_steps``."""
    sequences = call.sequences
    q, k, v, decay, beta = prompt_inputs(
        mixed_qkv, a, b, weight, a_log, dt_bias, history, state, sequences, call.tokens, key_heads
    )
    # A slot of a request that begins may hold anything, NaN included.
    initial = torch.where(call.kept, state.index_select(0, sequences.slots), call.blank)
    together = isinstance(call.rows, slice)
    _, result, _, final, *_ = chunk_gated_delta_rule_fwd(
        q=q[None],
        k=k[None],
        v=v[None],
        g=decay[None],
        beta=beta[None],
        scale=state.shape[3] ** -0.5,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=sequences.starts,
        chunk_indices=sequences.chunks,
        chunk_offsets=call.offsets,
        core_attn_out=out[call.rows].view(-1) if together else None,
    )
    if not together:
        out[call.rows] = result[0]
    state.index_copy_(0, sequences.slots, final)
