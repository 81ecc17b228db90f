"""The V2 runner's speculator, which skips the draft layer at depth 0 and catches up afterwards.

vLLM 0.32 runs the draft layer at depth 0 too, so that its KV cache has every position. The host
knows an upper bound of how far a request has come, so positions are looked up on the device; a
skipped step copies nothing to it and waits for nothing. The captured graphs are vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

from vllm_b70.compat.seams import require
from vllm_b70.speculation.draft_history import DraftHistory, kv_slots
from vllm_b70.speculation.draft_lag import WINDOW, DraftLag

require("propose_v2", "prefill_inputs_v2", "run_draft_v2", "input_batch_v2")


class SkippingSpeculator:
    """Mixin over vLLM's MTP speculator on the V2 runner. A request's slot is the runner's."""

    if TYPE_CHECKING:  # what vLLM's class under the mixin has

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        depth = self.num_speculative_steps
        self._lag = DraftLag(depth)
        self._history = DraftHistory(
            self.max_num_reqs, WINDOW + depth, self.hidden_size, self.dtype, device
        )
        self._rows = torch.arange(self.max_num_tokens, device=device)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Drafts [requests, depth] as vLLM's, -1 where there are none; arguments are its own."""
        batch, requests = input_batch, input_batch.num_reqs
        if not dummy_run and not is_profile:
            depth = num_speculative_tokens
            step = self._lag.step(
                batch.idx_mapping_np[:requests].tolist(),
                batch.num_scheduled_tokens[:requests].tolist(),
                batch.is_prefilling_np[:requests].tolist(),
                self.num_speculative_steps if depth is None else depth,
            )
            if step.skip:
                prepare_prefill_inputs(
                    self.last_token_indices,
                    self.current_draft_step,
                    self.input_buffers,
                    batch,
                    num_sampled,
                    num_rejected,
                    last_sampled,
                    next_prefill_tokens,
                    self.max_num_reqs,
                )
                self._record(batch, last_hidden_states, num_rejected)
                return self.draft_tokens[:requests].fill_(-1)
            if step.begun:
                self._history.forget(self._to_device(batch.idx_mapping_np[step.begun]))
            if any(step.replay):
                self._replay(batch, np.array(step.replay))
        return super().propose(  # type: ignore[misc]
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            temperature,
            seeds,
            dp_sync_state,
            dummy_run,
            skip_attn_for_dummy_run,
            mm_inputs,
            is_profile,
            num_speculative_tokens,
        )

    def _record(self, batch: Any, hidden: torch.Tensor, rejected: torch.Tensor) -> None:
        tokens = batch.num_tokens
        slots = batch.idx_mapping[: batch.num_reqs].long()
        accepted = None
        if tokens > batch.num_reqs:
            ends = batch.query_start_loc[1 : batch.num_reqs + 1]
            rows = self._rows[:tokens].to(ends.dtype)
            owners = torch.searchsorted(ends, rows, right=True)
            accepted = rows < (ends - rejected[: batch.num_reqs])[owners]
            slots = slots[owners]
        # Not those of the draft layer's inputs: vLLM leaves rejected rows of these as they were.
        positions = batch.positions[:tokens]
        self._history.record(
            slots, positions, self.input_buffers.input_ids[:tokens], positions, hidden[:tokens],
            accepted,
        )  # fmt: skip

    def _replay(self, batch: Any, counts: np.ndarray) -> None:
        """Write what the draft layer's KV cache lacks before each request's first row."""
        owners = np.repeat(np.arange(len(counts)), counts)
        back = np.concatenate([np.arange(count, 0, -1) for count in counts])
        owner, ago = self._to_device(owners), self._to_device(back)
        begin = batch.positions[batch.query_start_loc[: batch.num_reqs].long()]
        slots = batch.idx_mapping[: batch.num_reqs].long()
        positions = begin[owner] - ago
        kept, tokens, rotary, hidden = self._history.recall(slots[owner], positions)
        group = self._draft_group()
        table = self.block_tables.block_tables[group].gpu[slots]
        where = kv_slots(table, owner, positions, self.block_tables.block_sizes[group])
        where = torch.where(kept, where, PAD_SLOT_ID)
        for first in range(0, len(owners), self.max_num_tokens):
            rows = slice(first, first + self.max_num_tokens)
            count = len(owners[rows])
            self.input_buffers.input_ids[:count] = tokens[rows]
            self.input_buffers.positions[:count] = rotary[0, rows]
            self.hidden_states[:count] = hidden[rows]
            # Without metadata attention computes nothing, but keys and values are written.
            self._run_model(
                count, None, dict.fromkeys(self.draft_attn_layer_names, where[rows]), None
            )

    def _draft_group(self) -> int:
        """The KV-cache group of the draft layer."""
        return next(
            i
            for i, group in enumerate(self.kv_cache_config.kv_cache_groups)
            if self.draft_attn_layer_names & set(group.layer_names)
        )

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(values.tolist(), device=self.device, dtype=torch.int64)
