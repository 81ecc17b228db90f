"""vLLM's attention backend over ``ops.attention``, on a GPU.

Official seam: the platform names this class to vLLM in place of TRITON_ATTN, of which the layout of
the KV cache and the write into it are kept. Every field that changes with the step is a buffer that
vLLM keeps at one address, and no launch depends on its values, so full graphs of any batch are
supported, and a drafter's steps inside a graph need no update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_b70.compat.seams import require
from vllm_b70.ops.attention import LIMIT, PARTITIONS, paged_attention
from vllm_b70.plugin import PluginError

require("attention_metadata", "gpu_attention", "gpu_attention_metadata")


@dataclass
class RowInvariantAttentionMetadata:
    """What a step says to the kernel.

    Attributes:
        num_actual_tokens: Rows of the batch, padding of a graph included.
        max_query_len: Most query tokens of a sequence.
        max_seq_len: Longest sequence, or more.
        query_start_loc: [S + 1] int32.
        seq_lens: [S] int32.
        block_table: [S, ...] int32.
        slot_mapping: [T] int64; vLLM's write of the cache reads it.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class RowInvariantAttentionBuilder(AttentionMetadataBuilder[Any]):
    """Passes vLLM's buffers on; computes nothing, on neither side."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RowInvariantAttentionMetadata:
        m = common_attn_metadata
        if m.causal is not True or m.mm_req_doc_ranges is not None:
            raise NotImplementedError("only causal attention has an exact kernel")
        return RowInvariantAttentionMetadata(
            num_actual_tokens=m.num_actual_tokens,
            max_query_len=m.max_query_len,
            max_seq_len=m.max_seq_len,
            query_start_loc=m.query_start_loc[: m.num_reqs + 1],
            seq_lens=m.seq_lens[: m.num_reqs],
            block_table=m.block_table_tensor,
            slot_mapping=m.slot_mapping,
        )

    def update_draft_decode_metadata(self, metadata: RowInvariantAttentionMetadata) -> None:
        pass


def _verified_tokens() -> int:
    """Tokens of a request that a step may verify."""
    config = get_current_vllm_config_or_none()
    speculative = None if config is None else config.speculative_config
    return 1 + (0 if speculative is None else speculative.num_speculative_tokens or 0)


def _says_something(value: Any) -> bool:
    """Whether an argument asks for a feature; vLLM's defaults are these."""
    return not (value is None or value is False or (isinstance(value, int) and value == -1))


class RowInvariantAttentionImpl(TritonAttentionImpl):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: Any = None,
        **further: Any,
    ) -> None:
        refused = {
            f"head size {head_size}": head_size not in PARTITIONS,
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            f"a KV cache of {kv_cache_dtype}": kv_cache_dtype
            not in ("auto", "float16", "bfloat16"),
            "a soft cap of logits": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            ", ".join(further): any(_says_something(value) for value in further.values()),
        }
        for what, asked in refused.items():
            if asked:
                raise PluginError(
                    f"VLLM_B70=1 has no exact attention kernel for {what}: "
                    "use a model without it, or set VLLM_B70=0."
                )
        # Beyond, a verification would go to the kernel of prompts, where a draft that overflows
        # spoils the rows before it.
        group, tokens = num_heads // num_kv_heads, _verified_tokens()
        if tokens * group > LIMIT:
            raise PluginError(
                f"VLLM_B70=1 verifies no {tokens - 1} drafts at once where {group} query heads "
                f"share a key head: set num_speculative_tokens to at most {LIMIT // group - 1}."
            )
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
            kv_cache_dtype, logits_soft_cap, AttentionType.DECODER, kv_sharing_target_layer_name,
        )  # fmt: skip
        # The query stays in 16 bits.
        self.supports_quant_query_input = False

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: RowInvariantAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over the cache, which holds this step's keys and values already.

        Args:
            layer: Unread.
            query: [T, HQ, D].
            key, value: Unread; vLLM wrote them to the cache before.
            kv_cache: [blocks, H, block size, 2 * D], keys and values of a slot side by side.
            attn_metadata: None in vLLM's profiling run.
            output: [T, HQ, D], filled.
            output_scale, output_block_scale: Must be None.

        Returns:
            ``output``.
        """
        if attn_metadata is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("a quantised output is not covered")
        m = attn_metadata
        tokens = m.num_actual_tokens
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        paged_attention(
            query[:tokens], k, v, output[:tokens], m.block_table, m.query_start_loc, m.seq_lens,
            self.scale, m.max_query_len, m.max_seq_len,
        )  # fmt: skip
        return output


class RowInvariantAttentionBackend(TritonAttentionBackend):
    """Names the classes above to vLLM.

    It keeps the name TRITON_ATTN: vLLM looks a backend up by name in an enumeration, and what it
    knows under this name, the cache's layout and block sizes, is true of ours.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[RowInvariantAttentionImpl]:
        return RowInvariantAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RowInvariantAttentionBuilder]:
        return RowInvariantAttentionBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in PARTITIONS

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def _no(cls) -> bool:
        return False

    supports_non_causal = supports_rswa = supports_sliding_window = _no
    supports_mm_prefix = supports_sink = supports_alibi_sqrt = _no
