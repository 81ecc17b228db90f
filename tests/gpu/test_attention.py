"""Attention on a GPU: a query row has one set of bits, however it is computed."""

import random
from dataclasses import replace

import pytest
import torch

from vllm_b70.ops.attention import LIMIT, PARTITIONS, WORKSPACE, Launch, launch, paged_attention
from vllm_b70.ops.attention import plan as plan_of

HEADS, BLOCK = 4, 528
CASES = [  # head size, query heads of a key head, dtype
    (256, 4, torch.bfloat16),
    (256, 6, torch.float16),
    (128, 4, torch.float16),
    (64, 6, torch.bfloat16),
]


def differing(a, b):
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


class Cache:
    """A paged cache as vLLM lays it out, NaN in every slot that no sequence owns."""

    def __init__(self, lengths, size, dtype, block=BLOCK, heads=HEADS, nhd=False, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)
        blocks = [-(-length // block) for length in lengths]
        total = sum(blocks) + 2
        shape = (total, block, heads, 2 * size) if nhd else (total, heads, block, 2 * size)
        kv = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
        kv = kv if nhd else kv.transpose(1, 2)
        # Of its own: the same data in other blocks is what some tests compare.
        order = torch.Generator("cuda").manual_seed(seed + 1)
        order = torch.randperm(total, device="cuda", generator=order)
        self.table = torch.full((len(lengths), max(blocks) + 1), 2**30, device="cuda").int()
        used = 0
        for sequence, length in enumerate(lengths):
            own = order[used : used + blocks[sequence]]
            used += blocks[sequence]
            self.table[sequence, : len(own)] = own.int()
            data = torch.randn(length, heads, 2 * size, device="cuda", generator=generator)
            position = torch.arange(length, device="cuda")
            kv[own[position // block], position % block] = data.to(dtype)
        self.k, self.v = kv.split(size, dim=-1)
        self.size, self.dtype = size, dtype

    def dense(self, sequence, length):
        """[length, heads, D] keys and values."""
        position = torch.arange(length, device="cuda")
        block = self.table[sequence, position // self.k.shape[1]].long()
        at = (block, position % self.k.shape[1])
        return self.k[at], self.v[at]

    def queries(self, tokens, group, seed=1, scale=1.0):
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (tokens, self.k.shape[2] * group, self.size)
        return (scale * torch.randn(*shape, device="cuda", generator=generator)).to(self.dtype)


def run(cache, q, sequences, lens, lengths, plan=None, limit=LIMIT, workspace=WORKSPACE):
    """Queries of some sequences of the cache: how many each has, and the position after them."""
    starts = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
    ends = torch.tensor(lengths, device="cuda").int()
    table = cache.table[torch.tensor(sequences, device="cuda")]
    out = torch.full_like(q, float("nan"))
    group = q.shape[1] // cache.k.shape[2]
    launch(
        q, cache.k, cache.v, out, table, starts, ends, cache.size**-0.5, max(lens),
        max(1, *lengths), plan or plan_of(cache.size, max(lens) * group), limit, workspace,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_c1_widths_chunks_company_and_launches(case):
    size, group, dtype = case
    length = 2200
    cache = Cache([length, 5000, 9, 1, 700], size, dtype)
    q = cache.queries(length, group)
    whole = run(cache, q, [0], [length], [length])
    assert not whole.isnan().any()
    plan = plan_of(size, 1)
    # Chunked prefill.
    for chunk in (64, 1000):
        for first in range(0, length, chunk):
            last = min(first + chunk, length)
            got = run(cache, q[first:last], [0], [last - first], [last])
            assert differing(got, whole[first:last]) == 0, f"chunk {first}:{last}"
    # Verification of 1 to 17 tokens, around the borders of parts and blocks.
    for width in range(1, 18):
        for last in (width, 65, 256, 257, 513, 528, 530, 1024 + width, 2200):
            if last >= width:
                got = run(cache, q[last - width : last], [0], [width], [last])
                assert differing(got, whole[last - width : last]) == 0, f"{width} to {last}"
    # Company: other sequences' decodes, verifications and a prefill, before and after.
    other = cache.queries(900, group, seed=7)
    for width in (1, 4, 17):
        for lens, who, ends in (
            ([1, width, 1, 1, 5], [1, 0, 2, 3, 4], [5000, 2200, 9, 1, 700]),
            ([700, width, 9], [4, 0, 2], [700, 2200, 9]),
        ):
            batch = torch.cat([other[: lens[0]], q[2200 - width :], other[: sum(lens[2:])]])
            got = run(cache, batch, who, lens, ends)
            assert differing(got[lens[0] :][:width], whole[2200 - width :]) == 0, f"{width} {lens}"
            assert not got.isnan().any()
    # Launches and tiers.
    last, width = 2200, 8
    for split in (Launch(16, 8, 3), Launch(32, 4, 3), Launch(16, 4, 2), Launch(16, 4, 3, 168)):
        for workspace in (WORKSPACE, 500 * 4 * (size + 2), 0):
            got = run(
                cache, q[last - width :], [0], [width], [last], replace(plan, split=split),
                workspace=workspace,
            )  # fmt: skip
            assert differing(got, whole[last - width :]) == 0, f"{split} {workspace}"
    for walk in (Launch(64, 4, 2), Launch(64, 8, 2), Launch(16, 4, 2)):
        got = run(cache, q, [0], [length], [length], replace(plan, walk=walk), limit=0)
        assert differing(got, whole) == 0, str(walk)


@pytest.mark.parametrize("block", [16, 48, 784, 1024])
@pytest.mark.parametrize("nhd", [True, False])
def test_blocks_and_layouts(block, nhd):
    caches = [
        Cache([1500, 300], 256, torch.bfloat16, size, nhd=layout)
        for size, layout in ((BLOCK, False), (block, nhd))
    ]
    lens, ends = [3, 2], [1500, 300]
    dense = [torch.cat([x.flatten() for x in c.dense(0, 1500)]) for c in caches]
    assert differing(*dense) == 0
    q = caches[0].queries(5, 4)
    results = [run(c, q, [0, 1], lens, ends) for c in caches]
    assert differing(*results) == 0
    q = caches[0].queries(300, 4)
    results = [run(c, q, [1], [300], [300]) for c in caches]
    assert differing(*results) == 0


def test_sixty_four_sequences_of_1_to_32k():
    random.seed(3)
    lengths = [1, 32768, 2, 255, 256, 257, 8192, 17] + [random.randint(1, 6000) for _ in range(56)]
    cache = Cache(lengths, 256, torch.bfloat16)
    lens = [min(random.choice([1, 1, 2, 4, 17]), length) for length in lengths]
    q = cache.queries(sum(lens), 4)
    got = run(cache, q, range(64), lens, lengths)
    assert not got.isnan().any()
    first = 0
    for sequence, (count, length) in enumerate(zip(lens, lengths, strict=True)):
        alone = run(cache, q[first : first + count], [sequence], [count], [length])
        assert differing(got[first : first + count], alone) == 0, f"{count} of {length}"
        walked = run(cache, q[first : first + count], [sequence], [count], [length], limit=0)
        assert differing(alone, walked) == 0, f"walked {count} of {length}"
        first += count
    small = run(cache, q, range(64), lens, lengths, workspace=2**21)
    assert differing(small, got) == 0, "most sequences without workspace"


def test_131072_keys():
    cache = Cache([131072, 100], 256, torch.float16)
    q = cache.queries(5, 4)
    got = run(cache, q, [0, 1], [4, 1], [131072, 100])
    assert differing(got[:4], run(cache, q[:4], [0], [4], [131072], limit=0)) == 0
    exact = exact_rows(cache, q[:4], 0, 131072)
    assert (got[:4].double() - exact).abs().max() < 2e-3


def exact_rows(cache, q, sequence, length):
    """float64 attention of the last rows of a sequence."""
    k, v = (x.double() for x in cache.dense(sequence, length))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,nhd->htn", q.double(), k) * cache.size**-0.5
    position = length - q.shape[0] + torch.arange(q.shape[0], device="cuda")
    hidden = torch.arange(length, device="cuda")[None, :] > position[:, None]
    return torch.einsum("htn,nhd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_error_against_float64(case, scale):
    size, group, dtype = case
    cache = Cache([1333], size, dtype)
    q = cache.queries(17, group, scale=scale)
    exact = exact_rows(cache, q, 0, 1333)
    error = (run(cache, q, [0], [17], [1333]).double() - exact).abs().max()
    k, v = cache.dense(0, 1333)
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1)[None] for x in (k, v))
    hidden = torch.ones(17, 1333, dtype=torch.bool, device="cuda").tril(1333 - 17)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=hidden
    )[0].transpose(0, 1)
    assert error <= 3 * (theirs.double() - exact).abs().max() + 1e-5


def test_close_to_vllm():
    unified = pytest.importorskip("vllm.v1.attention.ops.triton_unified_attention")
    lengths, lens = [1500, 300, 9, 2000], [1, 4, 9, 300]
    cache = Cache(lengths, 256, torch.bfloat16)
    q = cache.queries(sum(lens), 4)
    want, one = torch.empty_like(q), torch.ones(1, device="cuda")
    unified.unified_attention(
        q=q, k=cache.k, v=cache.v, out=want,
        cu_seqlens_q=torch.tensor([0, *lens], device="cuda").cumsum(0).int(), max_seqlen_q=300,
        seqused_k=torch.tensor(lengths, device="cuda").int(), max_seqlen_k=2000,
        softmax_scale=256**-0.5, causal=True, window_size=(-1, -1), block_table=cache.table,
        softcap=0.0, q_descale=None, k_descale=one.expand(4, 4), v_descale=one.expand(4, 4),
    )  # fmt: skip
    got = run(cache, q, range(4), lens, lengths)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("width", [1, 4])
def test_captured_graph_serves_other_lengths_and_padding(width):
    lengths = [3000, 40, 700, 1000]
    cache = Cache(lengths, 256, torch.bfloat16)
    room = 8
    q = cache.queries(room * width, 4)
    want = run(cache, q[: 4 * width], range(4), [width] * 4, lengths)
    table = torch.zeros(room, cache.table.shape[1], device="cuda").int()
    starts = torch.zeros(room + 1, device="cuda").int()
    ends = torch.zeros(room, device="cuda").int()
    out, static = torch.empty_like(q), torch.zeros_like(q)

    def call():
        paged_attention(
            static, cache.k, cache.v, out, table, starts, ends, 256**-0.5, width, 131072
        )

    # As vLLM captures: every sequence as long as its query.
    starts.copy_(torch.arange(room + 1) * width)
    ends.fill_(width)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for live in (4, 2, 3, 4):
        static.fill_(float("nan"))
        static[: live * width] = q[: live * width]
        table.fill_(2**30)
        table[:live] = cache.table[:live]
        ends.zero_()
        ends[:live] = torch.tensor(lengths[:live]).int()
        starts.fill_(live * width)
        starts[: live + 1] = torch.arange(live + 1) * width
        graph.replay()
        assert differing(out[: live * width], want[: live * width]) == 0, f"{live} live"
        # Padding that kept a query but has no keys.
        starts.copy_(torch.arange(room + 1) * width)
        graph.replay()
        assert differing(out[: live * width], want[: live * width]) == 0
        assert (out[live * width :] == 0).all()


def test_a_later_token_that_overflowed_spoils_no_earlier_one():
    cache = Cache([600], 256, torch.bfloat16)
    q = cache.queries(4, 4)
    want = run(cache, q, [0], [4], [600])
    block, slot = cache.table[0, 599 // BLOCK].long(), 599 % BLOCK
    cache.v[block, slot, 1, 5] = float("inf")
    cache.k[block, slot, 2, 7] = float("nan")
    got = run(cache, q, [0], [4], [600])
    assert differing(got[:3], want[:3]) == 0 and got[3].isnan().any()


def worst(dtype):
    return [float("nan"), float("inf"), -float("inf"), torch.finfo(dtype).max]


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_widths_with_rejected_drafts(case):
    """Each step verifies 1 to 17 tokens and keeps some; the others leave garbage in the cache."""
    size, group, dtype = case
    first, length = 200, 700
    cache = Cache([length, 3000], size, dtype)
    q = cache.queries(length, group)
    whole = run(cache, q, [0], [length], [length])
    keys, values = (x.clone() for x in cache.dense(0, length))
    random.seed(5)
    position, steps = first, 0
    while position + 17 <= length:
        width = steps % 17 + 1
        kept = random.randint(1, width)
        end = position + width
        where = torch.arange(position, end, device="cuda")
        at = (cache.table[0, where // BLOCK].long(), where % BLOCK)
        queries = q[position:end].clone()
        k, v = keys[position:end].clone(), values[position:end].clone()
        for row in range(kept, width):
            queries[row], k[row], v[row] = (random.choice(worst(dtype)) for _ in range(3))
        cache.k[at], cache.v[at] = k, v
        if steps % 2:
            batch = torch.cat([q[:1], queries])
            got = run(cache, batch, [1, 0], [1, width], [3000, end])[1:]
        else:
            got = run(cache, queries, [0], [width], [end])
        want = whole[position : position + kept]
        assert differing(got[:kept], want) == 0, f"{kept} of {width} at {position}"
        position, steps = position + kept, steps + 1
    assert steps > 17


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_neighbours_of_any_magnitude(case):
    """One sequence stays as it is; all that the others hold and ask is as bad as can be."""
    size, group, dtype = case
    lengths, lens = [2000, 3000, 40, 600], [4, 1, 17, 300]
    q = Cache(lengths, size, dtype).queries(sum(lens), group)
    want = run(Cache(lengths, size, dtype), q, range(4), lens, lengths).split(lens)
    for kept in range(4):
        for value in worst(dtype):
            cache = Cache(lengths, size, dtype)
            queries = [x.clone() for x in q.split(lens)]
            for other in {0, 1, 2, 3} - {kept}:
                blocks = cache.table[other, : -(-lengths[other] // BLOCK)].long()
                cache.k[blocks] = cache.v[blocks] = value
                queries[other].fill_(value)
            for limit, workspace in ((LIMIT, WORKSPACE), (LIMIT, 2**16), (0, 0)):
                got = run(
                    cache, torch.cat(queries), range(4), lens, lengths, limit=limit,
                    workspace=workspace,
                ).split(lens)[kept]  # fmt: skip
                assert differing(got, want[kept]) == 0, f"{kept} beside {value}, limit {limit}"


def test_padding_of_any_content():
    """Sequences without queries and rows without a sequence, as padding may leave them."""
    lengths, lens = [3000, 40, 700], [1, 17, 200]
    cache = Cache(lengths, 256, torch.bfloat16)
    q = cache.queries(sum(lens) + 30, 4)
    q[sum(lens) :] = float("nan")
    want = run(cache, q[: sum(lens)], range(3), lens, lengths)
    starts = torch.tensor([0, *lens, 0, 0, 0, 0], device="cuda").cumsum(0).int()
    ends = torch.tensor([*lengths, 2**30, -(2**30), 1, 0], device="cuda").int()
    table = torch.cat([cache.table, torch.full_like(cache.table[:1].expand(4, -1), 2**30)])
    out = torch.full_like(q, 7.0)
    paged_attention(q, cache.k, cache.v, out, table, starts, ends, 256**-0.5, 200, 3000)
    assert differing(out[: sum(lens)], want) == 0
    assert (out[sum(lens) :] == 7.0).all()


def test_stale_workspace():
    cache = Cache([3000, 40], 256, torch.bfloat16)
    q = cache.queries(2, 4)
    want = run(cache, q, [0, 1], [1, 1], [3000, 40])
    stale = torch.full((WORKSPACE // 4,), float("nan"), device="cuda")
    del stale
    assert differing(run(cache, q, [0, 1], [1, 1], [3000, 40]), want) == 0


def test_every_head_size_has_a_partition():
    assert set(PARTITIONS) == {64, 128, 256}
