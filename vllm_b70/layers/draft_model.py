"""vLLM's MTP model of Qwen3.5, drafting from 4-bit weights.

Official seam: the model registry, by the name of vLLM's own class; both runners build the model
through it, let it share the target's embedding and lm_head, and ask it for draft tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP

from vllm_b70.compat.seams import require
from vllm_b70.layers.draft import DraftHead, DraftHeadMethod, quantise_linears
from vllm_b70.settings import current
from vllm_b70.speculation.shortlist import read_ids

require("mtp_logits", "mtp_top_tokens")


class DraftModel(Qwen3_5MTP):
    """The MTP model with a head of its own, which only drafts."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        settings = current()
        if settings.draft_layer == "int4":
            quantise_linears(self.model)
        self.draft_head: Any = None
        if settings.draft_head == "int4":
            path = settings.draft_shortlist
            listed = None if path is None else read_ids(path, self.config.vocab_size)
            method = DraftHeadMethod(self, settings.draft_head_group, listed, str(path))
            self.draft_head = DraftHead(method)

    def _drafting_head(self) -> Any:
        return self.lm_head if self.draft_head is None else self.draft_head

    def compute_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int = 0
    ) -> torch.Tensor | None:
        return self.logits_processor(self._drafting_head(), hidden_states)

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.logits_processor.get_top_tokens(
            self._drafting_head(), hidden_states
        )
        return tokens
