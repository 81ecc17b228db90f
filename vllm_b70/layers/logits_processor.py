"""Greedy tokens straight from the lm_head, where nothing else needs the logits.

Official seam: the out-of-tree class of vLLM's ``LogitsProcessor``. vLLM asks ``get_top_tokens`` for
draft tokens if ``--speculative-config`` has ``"use_local_argmax_reduction": true``.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from vllm_b70.compat.seams import require
from vllm_b70.layers.linear import RowInvariantEmbeddingMethod
from vllm_b70.ops import gemm  # noqa: F401  (defines the op)

require("top_tokens")


class RowInvariantLogitsProcessor(LogitsProcessor):
    """A logits processor that takes the argmax inside the GEMM, on CUDA and XPU."""

    def get_top_tokens(
        self,
        lm_head: Any,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The greedy token of each row, [M] int64: vLLM's own result without a row of logits.

        Args:
            lm_head: The head, or this rank's shard of it.
            hidden_states: [M, K].
            embedding_bias: [N] or None.
        """
        # A scale or soft cap rounds logits again, after which other columns may tie.
        exact = isinstance(lm_head.quant_method, RowInvariantEmbeddingMethod)
        on_gpu = exact and hasattr(lm_head, "b70_done")
        if not on_gpu or self.scale != 1.0 or self.soft_cap is not None:
            tokens: torch.Tensor = super().get_top_tokens(lm_head, hidden_states, embedding_bias)
            return tokens
        shard = lm_head.shard_indices
        columns = lm_head.weight.shape[0] - shard.num_org_vocab_padding
        bias = None if embedding_bias is None else embedding_bias[:columns]
        value, index = torch.ops.vllm_b70.gemm_argmax(
            hidden_states, lm_head.weight[:columns], bias, gemm.parts_of(lm_head.weight)
        )
        index = index + shard.org_vocab_start_index
        if lm_head.tp_size == 1:
            return index
        values = tensor_model_parallel_all_gather(value[:, None], dim=-1)
        indices = tensor_model_parallel_all_gather(index[:, None], dim=-1)
        # Ranks hold ascending columns and argmax takes the first of equals: the lowest column.
        return indices.gather(-1, values.argmax(dim=-1, keepdim=True))[:, 0]


def register() -> None:
    """Let vLLM build our logits processor in place of its own."""
    LogitsProcessor.register_oot(RowInvariantLogitsProcessor, name="LogitsProcessor")
