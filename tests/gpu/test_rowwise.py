"""vLLM's own ops on the path, taken as they are: row by row, and one token for equal logits.

These are not replaced. Each is called with the first rows of a batch and must give the bits of the
whole batch; the samplers must agree on every greedy token, ties and NaN included.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("vllm", reason="needs vLLM's CUDA ops")

from vllm import _custom_ops as vllm_ops
from vllm.model_executor.layers.fused_qk_norm_rope import fused_qk_rmsnorm_rope_gate
from vllm.model_executor.layers.rotary_embedding.mrope import triton_mrope
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from vllm_b70.layers.logits_processor import without_nan

TOKENS, HEADS, KV_HEADS, D, ROTARY, VOCABULARY = 1000, 16, 4, 256, 64, 248320
COUNTS = [1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 64, 100, 255, 256, 257, 999]
SECTION = [11, 11, 10]


def rows(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def check(op, counts=COUNTS):
    """``op`` of a count of rows gives the first rows of ``op`` of all of them."""
    whole = op(TOKENS)
    for count in counts:
        for got, want in zip(op(count), whole, strict=True):
            kind = torch.int32 if want.element_size() == 4 else torch.int16
            kind = torch.int64 if want.element_size() == 8 else kind
            want = want[:count].contiguous().view(kind)
            assert int((got.contiguous().view(kind) != want).sum()) == 0, f"{count} rows"


def positions(seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 131072, (3, TOKENS), device="cuda", generator=generator)


@pytest.fixture(scope="module")
def cache():
    angle = torch.outer(
        torch.arange(131072, device="cuda").float(),
        1e7 ** (-torch.arange(0, ROTARY, 2, device="cuda").float() / ROTARY),
    )
    return torch.cat([angle.cos(), angle.sin()], -1).bfloat16()


@pytest.mark.parametrize("mrope", [False, True])
def test_fused_norm_rotary_gate(cache, mrope):
    """What Qwen3.5's attention does on a GPU between its two projections."""
    qkv, weight = rows(TOKENS, (2 * HEADS + 2 * KV_HEADS) * D), rows(D, seed=1)
    where = positions()

    def op(count):
        q_gate, k, _ = qkv[:count].split([2 * HEADS * D, KV_HEADS * D, KV_HEADS * D], -1)
        position = where[:, :count] if mrope else where[0, :count]
        # As vLLM's runner lays positions out: one buffer for the largest batch.
        return fused_qk_rmsnorm_rope_gate(
            q_gate, k, weight, weight, cache, position, 1e-6, HEADS, KV_HEADS, D, ROTARY,
            mrope_section=SECTION if mrope else None, norm_beta=1.0,
        )  # fmt: skip

    check(op)


def test_rotary(cache):
    q, k, where = rows(TOKENS, HEADS * D), rows(TOKENS, KV_HEADS * D, seed=1), positions()[0]

    def op(count):
        q_out, k_out = q[:count].clone(), k[:count].clone()
        vllm_ops.rotary_embedding(where[:count], q_out, k_out, D, cache, True)
        return q_out, k_out

    check(op)


def test_mrope(cache):
    q, k, where = rows(TOKENS, HEADS * D), rows(TOKENS, KV_HEADS * D, seed=1), positions()

    def op(count):
        cos, sin = cache[where[:, :count]].chunk(2, -1)
        return triton_mrope(
            q[:count].clone(), k[:count].clone(), cos.contiguous(), sin.contiguous(), SECTION, D,
            ROTARY, True, True,
        )  # fmt: skip

    check(op)


def test_gates_activations_and_embedding():
    x, gate = rows(TOKENS, HEADS * D), rows(TOKENS, HEADS * D, seed=1)
    wide, table = rows(TOKENS, 2 * 12288), rows(1000, 4096)
    ids = torch.randint(0, 1000, (TOKENS,), device="cuda")

    def op(count):
        activated = torch.empty(count, 12288, dtype=x.dtype, device="cuda")
        torch.ops._C.silu_and_mul(activated, wide[:count])
        return (
            x[:count] * torch.sigmoid(gate[:count]),
            activated,
            torch.nn.functional.embedding(ids[:count], table),
        )

    check(op)


def logits(kind, count=64, dtype=torch.float32):
    """Logits with equal largest values on both sides of the samplers' blocks, and NaN."""
    x = rows(count, VOCABULARY, dtype=dtype)
    borders = [0, 1, 1023, 1024, 1025, 8191, 8192, 8193, 16384, 124159, 124160, VOCABULARY - 1]
    generator = torch.Generator().manual_seed(1)
    for row in range(count if kind != "random" else 0):
        chosen = torch.randperm(len(borders), generator=generator)[: 1 + row % 5]
        x[row, [borders[i] for i in chosen]] = 30.0
        if kind == "nan":
            x[row, borders[int(torch.randint(len(borders), (1,), generator=generator))]] = torch.nan
    if kind == "flat":
        x[:] = 1.0
    return x


def plain(x):
    """The V2 runner's sampler at temperature 0."""
    count = x.shape[0]
    zeros = torch.zeros(count, device="cuda")
    index = torch.arange(count, device="cuda").int()
    return gumbel_sample(
        x, index, zeros, zeros.long(), index.long(), apply_temperature=False, is_drafting=False
    )


def verified(x, drafts):
    """The V2 runner's rejection sampler at temperature 0: tokens, and how many of each request."""
    count, steps = x.shape[0], 3
    requests = count // (steps + 1)
    index = torch.arange(count, device="cuda").int()
    return rejection_sample(
        x, None, drafts, torch.arange(requests + 1, device="cuda").int() * (steps + 1),
        index.long(), index[:requests], index // (steps + 1), index % (steps + 1),
        torch.zeros(requests, device="cuda"), torch.zeros(requests, device="cuda").long(), steps,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["random", "ties", "flat", "nan"])
def test_greedy_tokens_agree(kind, dtype):
    # Samplers see what our logits processor leaves of a NaN; one row has nothing else.
    x = logits(kind, dtype=dtype)
    if kind == "nan":
        x[5] = torch.nan
    x = without_nan(x)
    want = plain(x)
    assert ((want >= 0) & (want < VOCABULARY)).all()
    first = (x == x.max(-1, keepdim=True).values).int().argmax(-1)
    assert torch.equal(want, first), "the lowest of the largest"
    alone = torch.cat([plain(x[i : i + 1]) for i in range(64)])
    assert torch.equal(alone, want)
    assert torch.equal(Sampler.greedy_sample(x), want), "the V1 sampler"
    drafts = torch.full((64,), -1, device="cuda")
    drafts.view(16, 4)[:, 1:] = want.view(16, 4)[:, :3]
    tokens, counts = verified(x, drafts)
    # The right drafts are all accepted, and the token after them is the same too.
    assert (counts == 4).all() and torch.equal(tokens.view(-1), want)
    # A wrong first draft gives way to the same token.
    drafts.view(16, 4)[:, 1] = (want.view(16, 4)[:, 0] + 1) % VOCABULARY
    tokens, counts = verified(x, drafts)
    assert (counts == 1).all() and torch.equal(tokens[:, 0], want.view(16, 4)[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs(dtype):
    x = logits("random", dtype=dtype)
    tokens = plain(x)
    whole = compute_topk_scores(x, 20, tokens)
    v1 = Sampler.compute_logprobs(x)
    for count in (1, 2, 3, 8, 17, 33):
        part = compute_topk_scores(x[:count], 20, tokens[:count])
        for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[:count]), name
        assert torch.equal(Sampler.compute_logprobs(x[:count]), v1[:count]), "V1"
