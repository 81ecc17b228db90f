"""Logits that every sampler of vLLM reads alike, and greedy tokens where nothing needs logits.

Official seam: the out-of-tree class of vLLM's ``LogitsProcessor``. vLLM asks ``get_top_tokens`` for
draft tokens if ``--speculative-config`` has ``"use_local_argmax_reduction": true``, which the
policy sets where drafts are greedy.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from vllm_b70.compat.seams import require

require("logits", "top_tokens")


def without_nan(logits: torch.Tensor) -> torch.Tensor:
    """Logits whose NaN are minus infinity; in place.

    vLLM's samplers resolve a row with a NaN each in its own way: V1's takes the first NaN, V2's
    plain one a token of the block that holds it, V2's rejection sampler one of another block. A
    request would get other tokens under speculation than without it.
    """
    infinity = float("inf")
    return torch.nan_to_num(logits, nan=-infinity, posinf=infinity, neginf=-infinity, out=logits)


class RowInvariantLogitsProcessor(LogitsProcessor):
    """A logits processor that gives no NaN, and takes the argmax inside the GEMM where the head's
    method can."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """vLLM's logits, [M, N] or None, without NaN; arguments as there."""
        logits = super().forward(*args, **kwargs)
        return None if logits is None else without_nan(logits)

    def get_top_tokens(
        self,
        lm_head: Any,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The greedy token of each row, [M] int64: that of ``forward``'s logits, of which there is
        no row where the head's method can do without.

        Args:
            lm_head: The head, or this rank's shard of it.
            hidden_states: [M, K].
            embedding_bias: [N] or None.
        """
        best = getattr(lm_head.quant_method, "best", None)
        # A scale or soft cap rounds logits again, after which other columns may tie.
        if best is None or self.scale != 1.0 or self.soft_cap is not None:
            found = None
        else:
            found = best(lm_head, hidden_states, embedding_bias)
        if found is None:
            logits = self.forward(lm_head, hidden_states, embedding_bias, skip_gather=True)
            assert logits is not None
            columns = logits.shape[-1] - lm_head.shard_indices.num_org_vocab_padding
            found = logits[..., :columns].max(dim=-1)
        value, index = found
        index = index + lm_head.shard_indices.org_vocab_start_index
        if lm_head.tp_size == 1:
            return index
        values = tensor_model_parallel_all_gather(value[:, None].float(), dim=-1)
        indices = tensor_model_parallel_all_gather(index[:, None], dim=-1)
        # Ranks hold ascending columns and argmax takes the first of equals: the lowest column.
        return indices.gather(-1, values.argmax(dim=-1, keepdim=True))[:, 0]


def register() -> None:
    """Let vLLM build our logits processor in place of its own."""
    LogitsProcessor.register_oot(RowInvariantLogitsProcessor, name="LogitsProcessor")
