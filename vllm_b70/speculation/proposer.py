"""The V1 runner's proposer, which skips the draft layer at depth 0 and catches up afterwards.

vLLM 0.32 runs the draft layer at depth 0 too, so that its KV cache has every position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context

from vllm_b70.compat.seams import require
from vllm_b70.speculation.draft_history import DraftHistory, kv_slots
from vllm_b70.speculation.draft_lag import WINDOW, DraftLag

require("propose_v1", "first_pass_v1", "attention_metadata")


class SkippingProposer:
    """Mixin over vLLM's MTP proposer on the V1 runner; ``runner`` says whose rows these are."""

    if TYPE_CHECKING:  # what vLLM's class under the mixin has

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)  # type: ignore[call-arg]
        depth = vllm_config.speculative_config.num_speculative_tokens
        slots = vllm_config.scheduler_config.max_num_seqs
        self._batch, self._lag = runner, DraftLag(depth)
        axes = 3 if self.uses_mrope else 1
        self._history = DraftHistory(
            slots, WINDOW + depth, self.hidden_size, self.dtype, device, axes
        )
        self._slots: dict[str, int] = {}
        self._free = list(range(slots))

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """Drafts [requests, num_speculative_tokens] as vLLM's; arguments are its own."""
        m = common_attn_metadata
        starts = m.query_start_loc[: m.num_reqs + 1].long()
        widths = starts.diff()
        batch = self._batch.input_batch
        slots = torch.tensor(self._slots_of(batch.req_ids[: m.num_reqs]))
        computed, prompt = batch.num_computed_tokens_cpu, batch.num_prompt_tokens
        step = self._lag.step(
            slots.tolist(),
            widths.tolist(),
            (computed[: m.num_reqs] < prompt[: m.num_reqs]).tolist(),
            num_speculative_tokens,
        )
        begin = m.seq_lens[: m.num_reqs].long() - widths
        if step.skip:
            rows, _, _ = self.set_inputs_first_pass(
                target_token_ids=target_token_ids,
                next_token_ids=next_token_ids,
                target_positions=target_positions,
                target_hidden_states=target_hidden_states,
                token_indices_to_sample=token_indices_to_sample,
                cad=m,
                num_rejected_tokens_gpu=num_rejected_tokens_gpu,
            )
            owners = torch.repeat_interleave(widths)
            accepted = None
            if num_rejected_tokens_gpu is not None:
                last = starts[1:] - num_rejected_tokens_gpu[: m.num_reqs].long()
                accepted = torch.arange(rows) < last[owners]
            self._history.record(
                slots[owners],
                begin[owners] + torch.arange(rows) - starts[owners],
                self.input_ids[:rows],
                self._get_positions(rows),
                self.hidden_states[:rows],
                accepted,
            )
            self._last_draft_probs = None
            return torch.empty((m.num_reqs, 0), dtype=torch.int64, device=self.device)
        if step.begun:
            self._history.forget(slots[step.begun])
        self._replay(step.replay, slots, begin, m.block_table_tensor)
        return super().propose(  # type: ignore[misc]
            num_speculative_tokens,
            target_token_ids,
            target_positions,
            target_hidden_states,
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            sampling_metadata,
            mm_embed_inputs,
            num_rejected_tokens_gpu,
            slot_mappings,
        )

    def _slots_of(self, requests: list[str]) -> list[int]:
        """The ring of each request; that of a request which is gone serves another."""
        for request in requests:
            if request in self._slots:
                continue
            if not self._free:
                for gone in self._slots.keys() - self._batch.requests.keys():
                    slot = self._slots.pop(gone)
                    self._lag.forget(slot)
                    self._history.forget(torch.tensor([slot]))
                    self._free.append(slot)
            self._slots[request] = self._free.pop()
        return [self._slots[request] for request in requests]

    def _replay(
        self, counts: list[int], slots: torch.Tensor, begin: torch.Tensor, table: torch.Tensor
    ) -> None:
        """Write what the draft layer's KV cache lacks before each request's first row."""
        owners = torch.repeat_interleave(torch.tensor(counts))
        back = torch.cat([torch.arange(count, 0, -1) for count in counts])
        positions = begin[owners] - back
        kept, tokens, rotary, hidden = self._history.recall(slots[owners], positions)
        where = kv_slots(table, owners, positions, self.block_size)[kept]
        tokens, rotary, hidden = tokens[kept], rotary[:, kept], hidden[kept]
        for first in range(0, len(tokens), self.max_num_tokens):
            rows = slice(first, first + self.max_num_tokens)
            count = len(tokens[rows])
            self.input_ids[:count] = tokens[rows]
            if self.uses_mrope:
                self.mrope_positions[:, :count] = rotary[:, rows]
            else:
                self.positions[:count] = rotary[0, rows]
            self.hidden_states[:count] = hidden[rows]
            inputs, _ = self.build_model_inputs_first_pass(count, count, None)
            # Without metadata attention computes nothing, but keys and values are written.
            with set_forward_context(
                None,
                self.vllm_config,
                num_tokens=count,
                slot_mapping=dict.fromkeys(self._draft_attn_layer_names, where[rows]),
            ):
                self.model(**inputs)
