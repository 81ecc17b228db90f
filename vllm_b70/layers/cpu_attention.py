"""vLLM's CPU attention, called so that a row's result depends on its position alone.

The kernel treats each request of a call on its own, but the blocks it works in follow how many
query rows a request brings. So every batch is handed over as more, smaller requests: rows inside
the prompt in tiles that begin on the chunk grid, all other rows one by one. The keys and values of
all rows are already in the cache when the kernel runs.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_b70.chunk_grid import GRID
from vllm_b70.compat.seams import require

require("cpu_attention_builder", "attention_metadata")


def cut_rows(
    query_starts: list[int], seq_lens: list[int], in_prompt: list[bool], grid: int = GRID
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut a batch into tiles whose shape depends on positions alone.

    Args:
        query_starts: Where each request's rows start in the batch, and their end.
        seq_lens: Position after each request's last row.
        in_prompt: Whether each request's rows lie inside its prompt.
        grid: Rows of a tile inside a prompt.

    Returns:
        The tiles' starts in the batch and their end [P + 1] int32, the position after each tile's
        last row [P] int32, and the request each belongs to [P] int64.
    """
    starts, ends, requests = [query_starts[0]], [], []
    for request, (first, last) in enumerate(zip(query_starts, query_starts[1:], strict=False)):
        position, end = seq_lens[request] - (last - first), seq_lens[request]
        while position < end:
            step = grid - position % grid if in_prompt[request] else 1
            step = min(step, end - position)
            position += step
            starts.append(starts[-1] + step)
            ends.append(position)
            requests.append(request)
    return np.array(starts, np.int32), np.array(ends, np.int32), np.array(requests, np.int64)


class RowInvariantCPUAttentionBuilder(CPUAttentionMetadataBuilder):
    """Hands vLLM's builder the cut batch."""

    #: A drafter's later passes do not say who is in the prompt; their results are only proposals.
    _drafting = False

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> CPUAttentionMetadata:
        self._drafting = True
        try:
            return super().build_for_drafting(common_attn_metadata, draft_index)
        finally:
            self._drafting = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        m = common_attn_metadata
        requests = m.num_reqs
        flags = m.is_prefilling
        if flags is not None and flags.shape[0] == requests:
            in_prompt = flags.tolist()
        elif self._drafting:
            in_prompt = [False] * requests
        else:
            raise RuntimeError(
                "vLLM did not say which requests are in their prompt, so rows cannot be computed "
                "by position; report this as a bug of vllm_b70."
            )
        starts, ends, owners = cut_rows(
            m.query_start_loc[: requests + 1].tolist(), m.seq_lens[:requests].tolist(), in_prompt
        )
        cut = m.replace(
            num_reqs=len(owners),
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(ends),
            max_query_len=int(np.diff(starts).max(initial=0)),
            block_table_tensor=m.block_table_tensor[torch.from_numpy(owners)],
            is_prefilling=None,
        )
        return super().build(common_prefix_len, cut, fast_build)


class RowInvariantCPUAttentionBackend(CPUAttentionBackend):
    """Names the builder to vLLM."""

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return RowInvariantCPUAttentionBuilder
