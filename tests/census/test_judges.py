"""The two judges, over ops of a few lines: what they pass, and what they must catch."""

import contextlib
import types
from dataclasses import replace

import pytest
import torch

from vllm_b70.census.rows import ALWAYS, DENSE, STRIDE, RowProbe, row_counts
from vllm_b70.census.steps import PROMPTS, TAIL, StepProbe
from vllm_b70.census.verdict import spans

CPU = torch.device("cpu")
WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))


def random(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 16, generator=generator), torch.randint(
        0, 9, (count,), generator=generator
    )


def exact(x, at):
    """One product at a time, so that no order of addition can follow the rows."""
    y = torch.zeros_like(x)
    for k in range(16):
        y = y + x[:, k : k + 1] * WEIGHT[k]
    return (y + at[:, None],)


def one_ulp(rows):
    def run(x, at):
        (y,) = exact(x, at)
        if len(x) in rows:
            y[-1, 3:4].view(torch.int32).add_(1)
        return (y,)

    return run


def numbers(text):
    """Inverse of ``spans``, whatever words are before it."""
    ends = [part.split()[-1].split("-") for part in text.split(", ")]
    return {n for end in ends for n in range(int(end[0]), int(end[-1]) + 1)}


PROBE = RowProbe("op", "16x16", 300, 256, 64, CPU, random, exact)


def test_an_unbroken_op_passes_twenty_times():
    for _ in range(20):
        verdict = PROBE.judge()
        assert verdict.exact and verdict.differs == "" and verdict.calls > 100


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_op_whose_results_are_not_finite_is_not_exact(value):
    verdict = replace(PROBE, run=lambda x, at: (torch.full_like(x, value),)).judge()
    assert not verdict.exact and "results that are not finite" in verdict.differs


def test_weights_may_be_0():
    assert replace(PROBE, run=lambda x, at: (torch.zeros_like(x),)).judge().exact


@pytest.mark.parametrize(
    "rows",
    [range(1, 2), range(2, 9), range(9, 25), range(17, 18), range(32, 33), range(100, 116),
     range(129, 130), range(255, 271), range(284, 300)],
    ids=spans,
)  # fmt: skip
def test_one_ulp_in_a_class_of_up_to_sixteen_row_counts(rows):
    verdict = replace(PROBE, run=one_ulp(rows)).judge()
    assert not verdict.exact
    assert set(rows) & numbers(verdict.differs.split(" rows")[0]), verdict.differs


def position(x, at):
    (y,) = exact(x, at)
    y[7:8] += 1e-3
    return (y,)


def neighbour(x, at):
    (y,) = exact(x, at)
    return (y + 0 * x.sum(0),)


def repeat():
    calls = iter(range(10**6))

    def run(x, at):
        (y,) = exact(x, at)
        return (y + (next(calls) == 40),)

    return run


def sign_of_zero(x, at):
    (y,) = exact(x, at)
    return (torch.where(torch.full_like(y, len(x) == 5).bool(), -0.0, 0.0),)


@pytest.mark.parametrize(
    ("run", "differs"),
    [
        (position, "in another order"),
        (neighbour, "beside NaN padding"),
        (neighbour, "among NaN and infinities"),
        (repeat(), "rows"),
        (sign_of_zero, "5 rows"),
        (lambda x, at: (x @ x.t().mean(1, keepdim=True),), "rows"),
    ],
)
def test_what_else_a_row_must_not_depend_on(run, differs):
    verdict = replace(PROBE, run=run).judge()
    assert not verdict.exact and differs in verdict.differs


def test_an_op_that_writes_to_its_inputs_is_judged_by_its_results():
    def run(x, at):
        result = exact(x, at)
        x.zero_()
        return result

    assert replace(PROBE, run=run).judge().exact


@pytest.mark.parametrize("most", [1, 5, 17, 33, 320, 8192])
def test_row_counts(most):
    counts = row_counts(most, (), 1e12)
    assert counts == sorted(set(counts)) and counts[-1] == most
    assert counts[:DENSE] == list(range(1, min(most, DENSE) + 1))
    # No run of 16 counts without one of them.
    assert all(b - a <= STRIDE for a, b in zip(counts, counts[1:], strict=False))


def test_row_counts_of_a_large_op_are_fewer():
    counts = row_counts(8192, (48, 80), 2000)
    assert set(range(1, ALWAYS + 1)) < set(counts) and sum(counts) <= 2000 + ALWAYS * (ALWAYS + 1)
    assert 48 in row_counts(320, (48,), 1500)
    assert row_counts(8192, (), 0) == list(range(1, ALWAYS + 1))
    assert len(row_counts(8192, (), 1e9, call=1e8)) <= ALWAYS + 10


class Recurrence:
    """A state a request, kept for as many tokens back as a step may reject."""

    fault = staticmethod(lambda rows, tokens: 0)

    def __init__(self, requests, streams):
        self.streams, self.kept = streams, [{} for _ in range(requests)]

    def step(self, pieces, padding):
        out, rows = [], sum(piece.tokens for piece in pieces)
        for piece in pieces:
            kept = self.kept[piece.slot]
            state = torch.zeros(4) if piece.first == 0 else kept[piece.first]
            stream = self.streams[piece.stream][0]
            for i in range(piece.tokens):
                wrong = i >= piece.tokens - piece.wrong
                x = torch.full((4,), 9.0) if wrong else stream[piece.first + i]
                state = 0.9 * state + x + self.fault(rows, piece.tokens)
                kept[piece.first + i + 1] = state
                out.append(state)
        return torch.stack(out)


def recurrence(kind, **change):
    @contextlib.contextmanager
    def session(requests, streams):
        yield kind(requests, streams)

    def inputs(count, seed):
        return (torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)),)

    return replace(StepProbe("step", "4", CPU, inputs, session, 12, 3), **change)


@pytest.mark.parametrize(("requests", "depth"), [(12, 3), (1, 0), (2, 16), (5, 0)])
def test_an_unbroken_recurrence_passes(requests, depth):
    verdict = recurrence(Recurrence, requests=requests, depth=depth).judge()
    assert verdict.exact, verdict.differs
    assert verdict.calls > len(PROMPTS) * TAIL


@pytest.mark.parametrize("width", [2, 3, 5, 16, 17])
def test_a_width_of_its_own_is_caught_and_named(width):
    class Broken(Recurrence):
        fault = staticmethod(lambda rows, tokens: 1e-6 * (tokens == width))

    verdict = recurrence(Broken).judge()
    assert width in numbers(verdict.differs.split(" of a request alone")[0])


@pytest.mark.parametrize("rows", [range(18, 34), range(22, 23), range(40, 56)], ids=spans)
def test_rows_of_a_step_in_company(rows):
    class Broken(Recurrence):
        fault = staticmethod(lambda count, tokens: 1e-6 * (count in rows and tokens < 18))

    verdict = recurrence(Broken).judge()
    assert "steps of" in verdict.differs


def test_a_rejected_draft_that_stays_and_a_neighbour_that_shows():
    class Stale(Recurrence):
        def step(self, pieces, padding):
            out = super().step(pieces, padding)
            for piece in pieces:
                self.kept[piece.slot][piece.first + piece.tokens - piece.wrong] = out[-1]
            return out

    class Leaky(Recurrence):
        def step(self, pieces, padding):
            out = super().step(pieces, padding)
            return out + 0 * out.sum()

    assert not recurrence(Stale).judge().exact
    verdict = recurrence(Leaky).judge()
    assert not verdict.exact and "alone" not in verdict.differs


def test_a_cut_of_the_prompt_is_caught():
    class Cut(Recurrence):
        def step(self, pieces, padding):
            out = super().step(pieces, padding)
            return out + 1e-6 * any(p.first and p.first < p.prompt for p in pieces)

    assert "a prompt's chunk" in recurrence(Cut).judge().differs


@pytest.mark.parametrize(
    ("block", "most", "longest"),
    [(16, 1024, 500), (528, 1024, 516), (784, 32768, 772), (784, 790, 500), (512, 524, 500)],
)
def test_the_longest_prompt_goes_on_into_a_second_block(block, most, longest):
    """A block of a 9B has 528 tokens, more than the longest prompt elsewhere."""
    pytest.importorskip("vllm")
    from vllm_b70.census import path

    config = types.SimpleNamespace(model_config=types.SimpleNamespace(max_model_len=most))
    finder = types.SimpleNamespace(config=config)
    assert path._Finder.over_a_block(finder, block) == (*PROMPTS[:-1], longest)


def test_spans():
    assert spans([]) == "" and spans([3]) == "3" and spans([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"


def test_logits_that_tie_are_among_what_the_sampler_is_asked():
    """A sampler that takes the last of equals at some row counts differs only where rows tie."""
    pytest.importorskip("vllm")
    from vllm_b70.census import path

    finder = object.__new__(path._Finder)
    model = types.SimpleNamespace(get_vocab_size=lambda: 1024)
    finder.config = types.SimpleNamespace(model_config=model, use_v2_model_runner=False)
    finder.device, finder.sampled, finder.special, finder.memory = CPU, 40, (), 2**29
    (probe,) = finder.samplers()
    assert probe.judge().exact
    (x,) = probe.inputs(40, 1)
    assert path._ties(x).tolist() == [False, True] * 20

    def last_of_equals(x):
        tokens = 1023 - x.flip(-1).argmax(-1) if len(x) in range(5, 9) else x.argmax(-1)
        return (tokens,)

    assert "5-8 rows" in replace(probe, run=last_of_equals).judge().differs
