"""Attention and the gated delta net as the judge of steps sees them.

Each session gives a loaded layer a cache of its own and calls it as vLLM's runner does: the
backend's metadata builder, vLLM's forward context, the layer's own entry. The cache begins as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_b70.census.steps import Piece, Tensors
from vllm_b70.compat.seams import require

require("attention_metadata")


class LayerSession:
    """A layer under vLLM's forward context; what both kinds of layers have in common."""

    #: Rows of the cache that a request has.
    units = 1

    def __init__(self, layer: Any, name: str, config: VllmConfig, streams: list[Tensors]) -> None:
        self.layer, self.name, self.config, self.streams = layer, name, config, streams
        self.device = streams[0][0].device
        self.spec = layer.get_kv_cache_spec(config)
        self._steps = 0

    def open(self, requests: int) -> None:
        """Give every request its part of a new cache, in a random order; unit 0 is vLLM's null."""
        total = 1 + requests * self.units
        order = 1 + torch.randperm(total - 1, generator=torch.Generator().manual_seed(requests))
        self.table = order.view(requests, self.units).int()
        self.layer.bind_kv_cache(self.cache(total))
        builder = self.layer.get_attn_backend().get_builder_cls()
        self.builder = builder(self.spec, [self.name], self.config, self.device)

    def cache(self, units: int) -> torch.Tensor:
        """A cache of so many units, full of NaN, as vLLM hands it to the layer."""
        raise NotImplementedError

    def call(self, inputs: Tensors) -> torch.Tensor:
        """The layer on all rows of a step, within the forward context."""
        raise NotImplementedError

    def begins(self, pieces: Sequence[Piece]) -> None:
        """Told before a step; what vLLM's runner does to the cache of new requests."""

    def slot_mapping(self, pieces: Sequence[Piece], rows: int) -> torch.Tensor:
        """[rows] int64, where each row's keys and values go; -1 for padding."""
        return torch.full((rows,), -1, dtype=torch.int64)

    def step(self, pieces: Sequence[Piece], padding: int) -> torch.Tensor:
        """As in ``Session``."""
        self._steps += 1
        self.begins(pieces)
        tokens = sum(piece.tokens for piece in pieces)
        inputs = tuple(
            torch.cat([*(self._rows(piece, i) for piece in pieces), part[:padding]])
            for i, part in enumerate(self.streams[-1])
        )
        metadata, slots = self._metadata(pieces, padding)
        built = self.builder.build(0, metadata)
        context = create_forward_context(
            {self.name: built}, self.config, slot_mapping={self.name: slots}
        )
        with override_forward_context(context):
            return self.call(inputs)[:tokens]

    def _rows(self, piece: Piece, part: int) -> torch.Tensor:
        stream = self.streams[piece.stream][part]
        kept = piece.tokens - piece.wrong
        rows = stream[piece.first : piece.first + kept]
        if not piece.wrong:
            return rows
        # A draft that will be rejected: rows of another place, and large.
        return torch.cat([rows, 50 * self.streams[0][part][: piece.wrong]])

    def _metadata(
        self, pieces: Sequence[Piece], padding: int
    ) -> tuple[CommonAttentionMetadata, torch.Tensor]:
        tokens = [piece.tokens for piece in pieces] + [0] * padding
        ends = [piece.first + piece.tokens for piece in pieces] + [0] * padding
        flags = torch.tensor([p.first < p.prompt for p in pieces] + [False] * padding)
        starts = torch.tensor([0, *accumulate(tokens)], dtype=torch.int32)
        table = torch.zeros((len(tokens), self.units), dtype=torch.int32)
        table[: len(pieces)] = self.table[[piece.slot for piece in pieces]]
        lengths = torch.tensor(ends, dtype=torch.int32)
        rows = sum(tokens) + padding
        slots = self.slot_mapping(pieces, rows).to(self.device)
        # A graph is captured for the longest request there may be.
        longest = max(max(ends), self.config.model_config.max_model_len * (self._steps % 2))
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device),
            num_reqs=len(tokens),
            num_actual_tokens=rows,
            max_query_len=max(tokens),
            max_seq_len=longest,
            block_table_tensor=table.to(self.device),
            slot_mapping=slots,
            is_prefilling=flags,
            # vLLM's host takes every draft for accepted.
            seq_lens_cpu_upper_bound=lengths + 9 * ~flags,
        ), slots


class AttentionSession(LayerSession):
    """vLLM's attention layer, its write of the cache included."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        longest = max(len(stream[0]) for stream in self.streams)
        self.units = self.units_of(self.spec, longest)

    @staticmethod
    def units_of(spec: Any, tokens: int) -> int:
        """Blocks of a request of so many tokens."""
        return -(-tokens // spec.block_size)

    def cache(self, units: int) -> torch.Tensor:
        s = self.spec
        shape = (units, s.num_kv_heads, s.block_size, s.head_size + s.head_size_v)
        return torch.full(shape, float("nan"), dtype=s.dtype, device=self.device)

    def begins(self, pieces: Sequence[Piece]) -> None:
        if self.device.type != "cpu":
            return
        # vLLM's CPU kernel multiplies the unwritten end of a block by zero, so its runner clears
        # the blocks of a request that begins.
        for piece in pieces:
            if piece.first == 0:
                self.layer.kv_cache[self.table[piece.slot].long()] = 0

    def slot_mapping(self, pieces: Sequence[Piece], rows: int) -> torch.Tensor:
        slots = super().slot_mapping(pieces, rows)
        first = 0
        for piece in pieces:
            at = torch.arange(piece.first, piece.first + piece.tokens)
            blocks = self.table[piece.slot][at // self.spec.block_size]
            slots[first : first + piece.tokens] = (
                blocks * self.spec.block_size + at % self.spec.block_size
            )
            first += piece.tokens
        return slots

    def call(self, inputs: Tensors) -> torch.Tensor:
        out: torch.Tensor = self.layer(*inputs)
        return out


class GatedDeltaNetSession(LayerSession):
    """The core of our gated delta net: convolution, gates, chunked and recurrent kernels."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.units = self.units_of(self.spec, 0)

    @staticmethod
    def units_of(spec: Any, tokens: int) -> int:
        """Slots of a request."""
        return 1 + int(spec.num_speculative_blocks)

    def cache(self, units: int) -> torch.Tensor:
        # All ones is NaN in every floating type.
        shape = (units, 1, 1, self.spec.page_size_bytes)
        return torch.full(shape, -1, dtype=torch.int8, device=self.device)

    def call(self, inputs: Tensors) -> torch.Tensor:
        qkvz, ba = inputs
        layer = self.layer
        # As the projections lay them out: views of wider rows.
        b, a = layer.split_ba(ba)
        heads = layer.num_v_heads // layer.tp_size
        out = torch.zeros(
            (len(qkvz), heads, layer.head_v_dim), dtype=qkvz.dtype, device=qkvz.device
        )
        mixed = qkvz[:, : layer.conv_dim // layer.tp_size]
        torch.ops.vllm_b70.gated_delta_net(mixed, b, a, out, self.name)
        return out


def sessions(
    kind: type[LayerSession], layer: Any, name: str, config: VllmConfig
) -> Callable[[int, list[Tensors]], AbstractContextManager[LayerSession]]:
    """What a ``StepProbe`` opens its sessions with; the layer's own cache comes back at the end."""

    @contextmanager
    def session(requests: int, streams: list[Tensors]) -> Iterator[LayerSession]:
        kept = getattr(layer, "kv_cache", None)
        opened = kind(layer, name, config, streams)
        opened.open(requests)
        try:
            yield opened
        finally:
            layer.kv_cache = kept

    return session
