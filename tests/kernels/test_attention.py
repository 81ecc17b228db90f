"""Attention in the interpreter: every tier and launch equals the reference, bit for bit."""

from dataclasses import replace

import pytest
import torch

from vllm_b70.ops import attention
from vllm_b70.ops.attention import Launch, Partition, Plan, launch
from vllm_b70.reference import attention as reference

D = 64
SCALE = D**-0.5
PLAN = Plan(Partition(32, 16), Launch(16, 4, 2), Launch(32, 4, 2))
PLANS = {
    "split16": (PLAN, 128, 2**20),
    "split32": (replace(PLAN, split=Launch(32, 4, 2)), 128, 2**20),
    "full workspace": (PLAN, 128, 40 * 4 * (D + 2)),
    "no workspace": (PLAN, 128, 0),
    "walk16": (replace(PLAN, walk=Launch(16, 4, 2)), 0, 0),
    "walk64": (replace(PLAN, walk=Launch(64, 4, 2)), 0, 0),
    "both": (PLAN, 16, 2**20),
}


class Cache:
    """A paged cache whose unused slots hold NaN and infinity, as recycled blocks may."""

    def __init__(self, lengths, block=48, heads=2, dtype=torch.bfloat16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        blocks = [-(-length // block) for length in lengths]
        total = sum(blocks) + 2
        # As vLLM lays it out: keys and values of a slot side by side.
        kv = torch.full((total, heads, block, 2 * D), float("nan"), dtype=dtype)
        kv[..., ::3] = float("inf")
        order = torch.randperm(total, generator=generator).to(torch.int32)
        self.table = torch.full((len(lengths), max(blocks, default=0) + 1), total - 1).int()
        self.keys, self.values, used = [], [], 0
        for sequence, length in enumerate(lengths):
            own = order[used : used + blocks[sequence]]
            self.table[sequence, : len(own)] = own
            used += len(own)
            data = torch.randn(length, heads, 2 * D, generator=generator).to(dtype)
            data[:, :, :D] *= 2
            for position in range(length):
                kv[own[position // block].long(), :, position % block] = data[position]
        self.k, self.v = kv.transpose(1, 2).split(D, dim=-1)
        self.heads, self.dtype = heads, dtype


def queries(tokens, heads, dtype=torch.bfloat16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(tokens, heads, D, generator=generator)).to(dtype)


def run(cache, q, lens, lengths, name="split16", padding=0):
    """Query lengths, lengths; ``padding`` more sequences without a query and of any length."""
    plan, limit, workspace = PLANS[name]
    starts = [0]
    for count in lens:
        starts.append(starts[-1] + count)
    starts = torch.tensor(starts + [starts[-1]] * padding, dtype=torch.int32)
    longest = max(*lengths, 1)
    lengths = [*lengths, *([2**30, -(2**30), 1, 0, 9] * padding)[:padding]]
    lengths = torch.tensor(lengths, dtype=torch.int32)
    table = torch.cat([cache.table, cache.table.new_full((padding, cache.table.shape[1]), 9**6)])
    out = torch.full_like(q, float("nan"))
    launch(
        q, cache.k, cache.v, out, table, starts, lengths, SCALE,
        max(lens), longest, plan, limit, workspace,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(
    ("heads", "group", "dtype"), [(2, 4, torch.bfloat16), (1, 6, torch.float16)]
)
@pytest.mark.parametrize("name", PLANS)
def test_equals_the_reference(name, heads, group, dtype):
    lengths, lens = [70, 1, 33, 100], [1, 1, 3, 9]
    cache = Cache(lengths, heads=heads, dtype=dtype)
    q = queries(sum(lens), heads * group, dtype)
    got = run(cache, q, lens, lengths, name)
    starts = [0, 1, 2, 5, 14]
    want = reference.paged_attention(
        q, cache.k, cache.v, cache.table, starts, lengths, SCALE, 32, 16
    )
    assert not want.isnan().any()
    assert torch.equal(got, want)


@pytest.mark.parametrize("block", [16, 24, 40, 64])
@pytest.mark.parametrize("name", ["split16", "walk16"])
def test_block_sizes(name, block):
    lengths, lens = [90, 17], [2, 5]
    cache = Cache(lengths, block)
    q = queries(7, 8)
    want = reference.paged_attention(
        q, cache.k, cache.v, cache.table, [0, 2, 7], lengths, SCALE, 32, 16
    )
    assert torch.equal(run(cache, q, lens, lengths, name), want)


def test_c1_query_widths_prefill_and_neighbours():
    """40 positions: in one prefill, in chunks, in verifications, one by one, in company."""
    cache = Cache([40, 75, 9], heads=1)
    q = queries(40, 4)
    other = queries(80, 4, seed=5)
    whole = run(cache, q, [40], [40], "walk64")
    assert not whole.isnan().any()
    for width in (1, 2, 5, 17):
        for name in ("split16", "split32", "walk16", "both"):
            if name != "split16" and width != 17:
                continue
            pieces = []
            for first in range(0, 40, width):
                last = min(first + width, 40)
                pieces.append(run(cache, q[first:last], [last - first], [last], name))
            assert torch.equal(torch.cat(pieces), whole), f"{name} {width}"
    for name in PLANS:
        batch = torch.cat([q[36:], other[:1], other[2:7]])
        got = run(cache, batch, [4, 1, 5], [40, 75, 9], name, padding=5)
        assert torch.equal(got[:4], whole[36:]), name
        assert not got.isnan().any()


@pytest.mark.parametrize(
    ("count", "name"),
    [*((17, name) for name in PLANS), (129, "full workspace"), (129, "both")],
)
def test_more_sequences_than_the_smallest_kernel_holds(count, name):
    """The kernels are compiled for 16 sequences, 128, and powers of two from there."""
    lengths = [(70, 1, 33, 17, 5)[i % 5] if i % 16 < 5 else 1 + i % 3 for i in range(count)]
    lens = [min((1, 3, 9, 2)[i % 4], length) for i, length in enumerate(lengths)]
    cache = Cache(lengths, heads=1)
    q = queries(sum(lens), 4)
    got = run(cache, q, lens, lengths, name, padding=3)
    table, first = cache.table, 0
    for i, (width, length) in enumerate(zip(lens, lengths, strict=True)):
        if count == 17 or i in (0, 15, 16, 17, 127, 128):
            cache.table = table[i : i + 1]
            alone = run(cache, q[first : first + width], [width], [length])
            assert torch.equal(got[first : first + width], alone), f"{width} of {length}"
        first += width


def test_rows_without_keys_are_zero_and_rows_of_nobody_are_left():
    cache = Cache([30, 0], heads=1)
    for name in ("split16", "walk16", "both"):
        got = run(cache, queries(12, 4), [2, 3], [30, 0], name)
        assert (got[2:5] == 0).all() and not got[:2].isnan().any()
        assert got[5:].isnan().all()
        # A length shorter than the query, as padding may have it: negative positions.
        got = run(cache, queries(5, 4), [5], [2], name)
        assert (got[:3] == 0).all() and not got.isnan().any()


def test_a_later_token_that_overflowed_spoils_no_earlier_one():
    cache = Cache([33], heads=1)
    q = queries(4, 4)
    want = run(cache, q, [4], [33])
    kv = [
        (cache.table[0, 32 // 48].long(), 32 % 48, value) for value in (float("inf"), float("nan"))
    ]
    for block, slot, value in kv:
        cache.v[block, slot, 0, 5] = value
        cache.k[block, slot, 0, 7] = value
        got = run(cache, q, [4], [33])
        assert torch.equal(got[:3], want[:3])
        assert got[3].isnan().any()


@pytest.mark.parametrize("part", [16, 48, 64])
def test_the_partition_is_part_of_the_arithmetic(part):
    """Were it not, equality over the tiers would show nothing about it."""
    cache = Cache([100], heads=1)
    q = queries(8, 4)
    out = [torch.empty_like(q), torch.empty_like(q)]
    starts, lengths = torch.tensor([0, 8]).int(), torch.tensor([100]).int()
    for result, size in zip(out, (32, part), strict=True):
        plan = replace(PLAN, partition=Partition(size, 16))
        launch(q, cache.k, cache.v, result, cache.table, starts, lengths, SCALE, 8, 100, plan)
    assert not torch.equal(*out)
    torch.testing.assert_close(*out, rtol=2e-2, atol=2e-2)


def test_close_to_float64():
    cache = Cache([100], heads=1)
    q = queries(8, 4)
    got = run(cache, q, [8], [100])
    position = torch.arange(100)
    block = cache.table[0, position // 48].long()
    k, v = (x[block, position % 48, 0].double() for x in (cache.k, cache.v))
    scores = q.double() @ k.t() * SCALE
    seen = position[None, None, :] <= (92 + torch.arange(8))[:, None, None]
    want = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


def test_what_does_not_fit_is_named():
    cache = Cache([30], heads=2)
    q = queries(2, 8)
    starts, lengths = torch.tensor([0, 2]).int(), torch.tensor([30]).int()

    def call(q=q, k=cache.k, v=cache.v, starts=starts, lengths=lengths):
        out = torch.empty_like(q)
        launch(q, k, v, out, cache.table, starts, lengths, SCALE, 2, 30, PLAN)

    call()
    with pytest.raises(ValueError, match="q must be"):
        call(q=q.float())
    with pytest.raises(ValueError, match="do not divide"):
        call(q=queries(2, 7))
    with pytest.raises(ValueError, match="v must be as k"):
        call(v=cache.v.contiguous())
    with pytest.raises(ValueError, match="lengths must be int32"):
        call(lengths=lengths.long())
    with pytest.raises(ValueError, match="need starts"):
        call(starts=starts[:1])
    with pytest.raises(ValueError, match="head size must be"):
        attention.plan(80, 1)
