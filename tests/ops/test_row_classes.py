"""Row classes of GEMMs with planted ones and of the CPU's own; every plan by enumeration."""

import itertools

import pytest
import torch

from vllm_b70.ops import native
from vllm_b70.ops import row_classes as rc

CPU = torch.device("cpu")
DEPTH, COLUMNS = 8, 96
WEIGHT = torch.randn(DEPTH, COLUMNS, generator=torch.Generator().manual_seed(0))


def exact(x):
    """A product whose row m is a function of row m: one addition at a time."""
    total = torch.zeros(len(x), COLUMNS)
    for k in range(DEPTH):
        total = total + x[:, k : k + 1].float() * WEIGHT[k]
    return total.bfloat16()


def ulp(y, kind=1):
    """One unit in the last place off in a fifth of the values; which ones follows the row alone."""
    bits = y.view(torch.int16)
    return (bits + ((bits + kind) % 5 == 0).to(torch.int16)).view(torch.bfloat16)


def planted(*firsts):
    """Classes that begin at these row counts."""
    return lambda x: ulp(exact(x), sum(len(x) >= first for first in firsts))


def bases(counts):
    return rc.inputs(max(counts) + rc.compared(COLUMNS), DEPTH, torch.bfloat16, CPU)


def classes(gemm, counts):
    return [one.members for one in rc.find(gemm, bases(counts), counts)]


def runs(firsts, counts):
    bounds = [*firsts, max(counts) + 1]
    return [
        tuple(c for c in counts if a <= c < b) for a, b in zip(bounds, bounds[1:], strict=False)
    ]


@pytest.mark.parametrize("firsts", [(1,), (1, 2), (1, 33), (1, 5, 9, 128), (1, 200), (1, 2, 3)])
@pytest.mark.parametrize("step", [1, 7])
def test_planted_classes_are_found_exactly(firsts, step):
    counts = tuple(range(1, 201, step))
    want = [members for members in runs(firsts, counts) if members]
    assert classes(planted(*firsts[1:]), counts) == want


def test_a_class_that_comes_back_is_one_class():
    def gemm(x):
        return ulp(exact(x), 2 if 9 <= len(x) < 40 else 1)

    counts = tuple(range(1, 97))
    assert classes(gemm, counts) == [(*range(1, 9), *range(40, 97)), tuple(range(9, 40))]


def test_one_value_of_one_row_is_enough():
    def gemm(x):
        y = exact(x)
        if len(x) == 17:
            y.view(torch.int16)[11, 5] += 1
        return y

    assert (17,) in classes(gemm, tuple(range(1, 33)))


def test_what_differs_on_the_third_input_only():
    def gemm(x):
        small = bool(x.abs().max() < 0.9)
        return ulp(exact(x), 2) if small and len(x) > 40 else exact(x)

    counts = tuple(range(1, 65))
    found = bases(counts)
    assert [bool(x.abs().max() < 0.9) for x in found] == [False, False, True]
    want = [tuple(range(1, 41)), tuple(range(41, 65))]
    assert classes(gemm, counts) == want
    assert len(rc.find(gemm, found[:2], counts)) == 1, "two inputs would have merged them"


class Flipping:
    """Now and then another result for the same input."""

    def __init__(self, first, every=11):
        self.first, self.every, self.calls = first, every, 0

    def __call__(self, x):
        self.calls += 1
        y = exact(x)
        return ulp(y, 3) if len(x) >= self.first and self.calls % self.every == 0 else y


def edge(x):
    """The last row of a tile of 16 that is not full."""
    y = exact(x)
    if len(x) > 16 and len(x) % 16:
        y[-1:] = ulp(y[-1:], 3)
    return y


def placed(x):
    """The second half of a tile of 64."""
    y = exact(x)
    late = torch.arange(len(x)) % 64 >= 32
    return torch.where(late[:, None], ulp(y, 3), y)


def leaking(x):
    """Any NaN of the call reaches every row, as 0 * NaN does."""
    return exact(x) + (0 * x.sum()).bfloat16() if len(x) > 8 else exact(x)


def counting(x):
    """The number of rows that are not zero picks the order."""
    return ulp(exact(x), 3) if int((x != 0).any(1).sum()) < len(x) else exact(x)


@pytest.mark.parametrize(
    ("gemm", "count", "why"),
    [
        (Flipping(1, every=7), 20, "not deterministic"),
        (edge, 20, "a row's place shows"),
        (placed, 40, "a row's place shows"),
        (leaking, 9, "other rows show (NaN)"),
        (counting, 9, "other rows show (zeros)"),
    ],
    ids=["flipping", "edge", "placed", "leaking", "counting"],
)
def test_each_fault_is_refused_for_its_reason(gemm, count, why):
    counts = tuple(range(1, 65))
    assert why in rc.certify(gemm, bases(counts), count)
    plan = rc.make_plan(gemm, bases(counts), counts, 0)
    assert count not in plan.members


@pytest.mark.parametrize("gemm", [exact, planted(1), planted(5, 9)])
def test_a_sound_gemm_is_certified_at_every_count(gemm):
    counts = tuple(range(1, 41))
    assert [rc.certify(gemm, bases(counts), count) for count in counts] == [""] * 40


def test_the_first_the_middle_and_the_last_member_are_asked():
    counts = tuple(range(1, 65))
    for bad in (10, 20, 30):
        flips = itertools.cycle([1, 2, 1])

        def gemm(x, bad=bad, flips=flips):
            return ulp(exact(x), next(flips)) if len(x) == bad else exact(x)

        why = rc.refusal(gemm, bases(counts), tuple(range(10, 31)))
        assert why == f"it is not deterministic at {bad} rows"


def test_a_nondeterministic_class_is_left_out_and_another_taken():
    flips = itertools.count()

    def gemm(x):
        if len(x) < 33:
            return ulp(exact(x), 2)
        return ulp(exact(x), 3 + (next(flips) > 5000)) if len(x) > 128 else exact(x)

    counts = tuple(range(1, 161))
    plan = rc.make_plan(gemm, bases(counts), counts, 0)
    # Of those that reach 128 rows only the second is deterministic.
    assert plan.members == tuple(range(33, 129))


@pytest.mark.parametrize(("nbytes", "first", "last"), [(0, 33, 197), (rc.LARGE, 201, 497)])
def test_small_weights_begin_early_and_large_ones_are_populous(nbytes, first, last):
    counts = tuple(range(1, 501, 4))
    plan = rc.make_plan(planted(33, 200), bases(counts), counts, nbytes)
    assert (plan.members[0], plan.members[-1]) == (first, last)


def test_a_class_that_stays_below_what_the_server_needs_comes_last():
    counts = tuple(range(1, 65))
    # 64 rows are all that is needed, and only the second class has them.
    assert rc.make_plan(planted(33), bases(counts), counts, 0).members[0] == 33
    with_short = rc.preference([rc.RowClass((1, 2)), rc.RowClass((3, 64))], 64, 0)
    assert [c.members for c in with_short] == [(3, 64), (1, 2)]


def test_without_a_whole_class_pieces_of_the_rows_that_are_certified():
    def gemm(x):
        return placed(x) if len(x) > 32 else exact(x)

    counts = tuple(range(1, 65))
    plan = rc.make_plan(gemm, bases(counts), counts, 0)
    assert plan.members and plan.members[-1] <= 32
    assert rc.refusal(gemm, bases(counts), plan.members) == ""


@pytest.mark.parametrize("gemm", [Flipping(1, every=2), leaking])
def test_where_nothing_is_certified_the_plan_says_why(gemm):
    counts = tuple(range(9, 33))
    plan = rc.make_plan(gemm, bases(counts), counts, 0)
    assert plan.members == () and "no class" in plan.why and "rows" in plan.why


@pytest.mark.parametrize(
    ("gemm", "why"),
    [
        (lambda x: torch.zeros(len(x), COLUMNS).bfloat16(), "rows that differ give one result"),
        (lambda x: exact(x) * float("nan"), "not finite"),
    ],
)
def test_results_that_say_nothing_make_no_class(gemm, why):
    counts = (1, 2, 40)
    plan = rc.make_plan(gemm, bases(counts), counts, 0)
    assert plan.members == () and why in plan.why


MEMBERS = [
    tuple(range(1, 33)),
    tuple(range(33, 65)),
    (1, 2, 4, 8, 16, 32, 64),
    (5, 6, 17, 40),
    (7,),
    (16, 32, 48),
    tuple(range(33, 321)),
    (1, 100),
]


@pytest.mark.parametrize("members", MEMBERS, ids=str)
def test_every_call_is_covered_once_by_members_and_padded_no_more_than_needed(members):
    largest = members[-1]
    for rows in range(401):
        pieces = rc.pieces(members, rows)
        assert sum(count for count, _ in pieces) == rows
        assert all(0 < count <= called and called in members for count, called in pieces)
        assert len(pieces) == -(-rows // largest)
        padding = sum(called for _, called in pieces) - rows
        # All pieces but the last one are whole.
        assert all(count == called for count, called in pieces[:-1])
        if len(pieces) == 1:
            assert padding == min(m for m in members if m >= rows) - rows
        elif pieces:
            rest = rows - (len(pieces) - 2) * largest
            sums = [a + b for a in members for b in members if a + b >= rest]
            assert padding == min(sums) - rest


@pytest.mark.parametrize("members", [*MEMBERS, (1, 2, 4, 6, 7)], ids=str)
def test_spans_are_the_members(members):
    assert rc.members_of(rc.spans(members)) == members
    assert rc.spans(()) == () and rc.members_of(()) == ()


@pytest.mark.parametrize("most", [1, 5, 17, 31, 64, 100, 512, 1024])
def test_row_counts(most):
    everything = rc.row_counts(most, 1e12, 1, 1)
    dense = min(most, rc.DENSE)
    assert everything[:dense] == tuple(range(1, dense + 1)) and everything[-1] == most
    assert all(b - a <= max(1, a // 16) for a, b in itertools.pairwise(everything))
    few = rc.row_counts(most, 0, 1, 1)
    assert few == tuple(range(1, min(most, rc.ALWAYS) + 1))
    some = rc.row_counts(most, most + 1 + 33, 1, 1)
    assert most in some and (32 in some) == (most >= 32) and set(few) <= set(some)


def test_fingerprints_see_every_bit():
    for dtype, kind in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        for columns in (33, 64):
            y = torch.randn(4, columns).to(dtype)
            before = rc.fingerprints(y)
            for bit in range(torch.iinfo(kind).bits - 1):
                y.view(kind)[2, columns - 1] ^= 1 << bit
                assert (rc.fingerprints(y) == before).tolist() == [True, True, False, True]
                y.view(kind)[2, columns - 1] ^= 1 << bit
    assert len(rc.fingerprints(torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0]])).unique()) == 3


def spans_and_bits(gemm, x, members):
    """What the op's planning gives for any part of x."""
    native.reserve(CPU, x.dtype, x.shape[1], members[-1])
    return native.in_class(x, COLUMNS, rc.spans(members), gemm)


def test_calls_through_a_plan_use_members_only_and_one_class():
    called = []

    def gemm(x):
        called.append(len(x))
        return planted(33, 200)(x)

    members = tuple(range(33, 65))
    x = torch.randn(400, DEPTH).bfloat16()
    want = planted(33, 200)(torch.cat([x, x])[:64])[:32]
    for rows in range(1, 400, 3):
        got = spans_and_bits(gemm, x[:rows].clone(), members)
        assert torch.equal(got[:32], want[: min(rows, 32)]) and len(got) == rows
    assert set(called) <= set(members)
    assert len(spans_and_bits(gemm, x[:0], members)) == 0


def test_rows_that_begin_anywhere_are_called_from_aligned_memory():
    x = torch.randn(64 * DEPTH + 3).bfloat16()[3:].view(64, DEPTH)
    assert not native.is_aligned(x)

    def gemm(x):
        assert native.is_aligned(x)
        return exact(x)

    assert torch.equal(spans_and_bits(gemm, x, (20, 32)), exact(x))


def test_no_buffer_is_made_in_a_call():
    with pytest.raises(RuntimeError, match="reserved before"):
        native.in_class(torch.randn(3, 777).bfloat16(), COLUMNS, (4, 4, 1), exact)


@pytest.mark.parametrize(("columns", "depth"), [(768, 512), (64, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gemm_of_this_cpu_gets_a_plan_and_the_op_is_exact(columns, depth, dtype):
    weight = (torch.randn(columns, depth) / 16).to(dtype)
    gemm = native.linear_gemm(weight)
    counts = (*range(1, 41), 48, 64, 96)
    found = rc.inputs(96 + rc.compared(columns), depth, dtype, CPU)
    plan = rc.make_plan(gemm, found, counts, weight.nbytes)
    assert plan.members, plan.why
    spans = rc.spans(plan.members)
    native.reserve(CPU, dtype, depth, plan.members[-1])
    op = torch.ops.vllm_b70.native_linear
    bias = torch.randn(columns).to(dtype)
    x = torch.randn(96, depth).to(dtype)
    whole = op(x, weight, bias, spans)
    assert torch.allclose(
        whole.float(), x.float() @ weight.float().t() + bias.float(), atol=0.1, rtol=0.02
    )
    for rows in range(1, 97):
        assert torch.equal(op(x[:rows], weight, bias, spans), whole[:rows]), rows
        assert torch.equal(op(x[96 - rows :], weight, bias, spans), whole[96 - rows :]), rows
    for seed in range(20):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(seed))[: 7 + 4 * seed]
        assert torch.equal(op(x[order], weight, bias, spans), whole[order])


def test_shapes_that_do_not_fit():
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(8, 32).bfloat16()
    with pytest.raises(ValueError, match="weight must be"):
        torch.ops.vllm_b70.native_linear(x, weight, None, [1, 8, 1])
    with pytest.raises(ValueError, match="weight must be int32"):
        torch.ops.vllm_b70.native_int4_linear(x, weight, weight, weight, None, 32, [1, 8, 1])


def test_the_ops_are_opaque_and_keep_their_shape():
    weight = torch.randn(16, 64).bfloat16()
    native.reserve(CPU, weight.dtype, 64, 8)

    def run(x):
        return torch.ops.vllm_b70.native_linear(x, weight, None, [1, 8, 1]) + 1

    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    for rows in (3, 20):
        x = torch.randn(rows, 64).bfloat16()
        assert torch.equal(compiled(x), run(x))


def test_a_buffer_reserved_in_inference_mode_serves_outside_of_it():
    weight = torch.randn(16, 40).bfloat16()
    with torch.inference_mode():
        native.reserve(CPU, weight.dtype, 40, 8)
    op = torch.ops.vllm_b70.native_linear
    x = torch.randn(3, 40).bfloat16()
    with torch.inference_mode():
        inside = op(x, weight, None, [8, 8, 1])
    assert torch.equal(op(x, weight, None, [8, 8, 1]), inside)
