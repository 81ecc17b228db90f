"""vLLM's view of the attention, in the interpreter."""

import types

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from vllm_b70.layers import attention as layers
from vllm_b70.layers.attention import (
    RowInvariantAttentionBackend,
    RowInvariantAttentionBuilder,
    RowInvariantAttentionImpl,
)
from vllm_b70.ops.attention import PARTITIONS
from vllm_b70.plugin import PluginError
from vllm_b70.reference import attention as reference

HEADS, GROUP, D, BLOCK = 2, 2, 64, 32


def common(starts, lengths, table, slots, **changed):
    starts, lengths = torch.tensor(starts).int(), torch.tensor(lengths).int()
    fields = dict(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths,
        num_reqs=len(lengths), num_actual_tokens=int(starts[-1]),
        max_query_len=int(starts.diff().max()), max_seq_len=int(lengths.max()),
        block_table_tensor=table, slot_mapping=slots,
    )  # fmt: skip
    return CommonAttentionMetadata(**fields | changed)


def impl(**changed):
    arguments = dict(
        num_heads=HEADS * GROUP, head_size=D, scale=D**-0.5, num_kv_heads=HEADS,
        alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
    )  # fmt: skip
    return RowInvariantAttentionImpl(**arguments | changed)


def test_steps_of_two_sequences():
    """A prefill and decodes through the cache, with a padded row whose slot is empty."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.full((6, HEADS, BLOCK, 2 * D), float("nan"), dtype=torch.bfloat16)
    table = torch.tensor([[4, 1, 0], [3, 5, 0]]).int()
    attention = impl()
    builder = RowInvariantAttentionBuilder(None, [], None, torch.device("cpu"))
    lengths = [0, 0]
    part = PARTITIONS[D]
    for new in ((35, 3), (1, 4), (2, 1)):
        lengths = [a + b for a, b in zip(lengths, new, strict=True)]
        starts = [0, new[0], sum(new)]
        tokens = sum(new) + 1
        q, k, v = (
            torch.randn(tokens, heads, D, generator=generator).bfloat16()
            for heads in (HEADS * GROUP, HEADS, HEADS)
        )
        position = torch.cat([torch.arange(n - w, n) for n, w in zip(lengths, new, strict=True)])
        owner = torch.tensor([0] * new[0] + [1] * new[1])
        slots = table[owner, position // BLOCK].long() * BLOCK + position % BLOCK
        slots = torch.cat([slots, torch.tensor([-1])])
        # vLLM's own kernel for this is not there on its CPU build.
        for row in range(sum(new)):
            kv[slots[row] // BLOCK, :, slots[row] % BLOCK] = torch.cat([k[row], v[row]], -1)
        metadata = builder.build(0, common(starts, lengths, table, slots))
        output = torch.full_like(q, float("nan"))
        attention.forward(torch.nn.Module(), q, k, v, kv, metadata, output)
        cached = kv.transpose(1, 2).split(D, dim=-1)
        want = reference.paged_attention(
            q[:-1], *cached, table, starts, lengths, D**-0.5, part.part, part.tile
        )
        assert not want.isnan().any() and torch.equal(output[:-1], want)
        assert output[-1].isnan().all()


def test_what_the_backend_says_of_itself():
    backend = RowInvariantAttentionBackend
    assert RowInvariantAttentionBuilder._cudagraph_support == AttentionCGSupport.ALWAYS
    assert backend.supports_head_size(256) and not backend.supports_head_size(80)
    assert not backend.supports_kv_cache_dtype("fp8")
    for name in ("sliding_window", "sink", "non_causal", "mm_prefix", "rswa", "alibi_sqrt"):
        assert not getattr(backend, f"supports_{name}")()
    assert backend.supports_block_size(528)


@pytest.mark.parametrize(
    "changed",
    [
        {"sliding_window": 128},
        {"head_size": 80},
        {"kv_cache_dtype": "fp8"},
        {"logits_soft_cap": 30.0},
        {"sinks": torch.ones(4)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_has_no_exact_kernel_is_refused(changed):
    with pytest.raises(PluginError, match="no exact attention kernel"):
        impl(**changed)


@pytest.mark.parametrize(("group", "most"), [(4, 31), (6, 20), (8, 15)])
def test_drafts_that_would_go_to_the_kernel_of_prompts_are_refused(group, most, monkeypatch):
    for depth in (None, most, most + 1):
        config = types.SimpleNamespace(
            speculative_config=depth and types.SimpleNamespace(num_speculative_tokens=depth)
        )
        monkeypatch.setattr(layers, "get_current_vllm_config_or_none", lambda config=config: config)
        if depth == most + 1:
            with pytest.raises(PluginError, match=f"at most {most}"):
                impl(num_heads=HEADS * group)
        else:
            impl(num_heads=HEADS * group)


def test_other_masks_are_refused():
    builder = RowInvariantAttentionBuilder(None, [], None, torch.device("cpu"))
    table, slots = torch.zeros(1, 1).int(), torch.zeros(1).long()
    with pytest.raises(NotImplementedError, match="causal"):
        builder.build(0, common([0, 1], [1], table, slots, causal=False))
