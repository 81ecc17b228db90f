"""Every kind of graph that is not its eager step is found and named; those that are pass."""

import pytest
import torch

from vllm_b70.graphs.verify import DRAFTER, TARGET, GraphError, Part, difference, enforce, verify

HIDDEN, STATE, INDEX = (Part(TARGET, what) for what in ("hidden states", "state", "index"))
DRAFTS = Part(DRAFTER, "drafts")


class Run:
    """A step over buffers that a graph reads by address, as ``CapturedRun`` has it."""

    def __init__(self, requests=8, depth=3):
        self.requests, self.depth = requests, depth
        self.rows = requests * (depth + 1)
        self.name = f"{requests} requests of {depth + 1} tokens"
        self.inputs, self.index = torch.zeros(self.rows), torch.zeros(self.rows, dtype=torch.int32)
        self.seen = self.inputs, self.index
        self.state = torch.zeros(self.rows)
        self.calls = []

    def prepare(self, seed):
        self.calls.append(("prepare", seed))
        draw = torch.Generator().manual_seed(seed)
        self.fill(torch.randn(self.rows, generator=draw), torch.randperm(self.rows, generator=draw))
        return True

    def fill(self, inputs, index):
        self.inputs.copy_(inputs)
        self.index.copy_(index)

    def step(self, inputs, index):
        self.state[index.long()] = inputs * 3
        return {
            HIDDEN: torch.stack([inputs * 2, -inputs], 1)[index.long()].half(),
            STATE: self.state.clone(),
            DRAFTS: index.clone(),
        }

    def replay(self):
        self.calls.append("replay")
        return self.step(*self.seen)

    def eager(self):
        self.calls.append("eager")
        return self.step(self.inputs, self.index)

    def buffers(self):
        return {INDEX: self.index}


class OneUlp(Run):
    def replay(self):
        results = super().replay()
        results[HIDDEN].view(torch.int16)[5, 0] += 1
        return results


class Stale(Run):
    """An index buffer that is replaced where it ought to be filled."""

    def fill(self, inputs, index):
        self.inputs.copy_(inputs)
        self.index = index.int()


class Deaf(Run):
    """A replay that gives the results of the capture whatever its inputs."""

    def __init__(self):
        super().__init__()
        self.captured = self.step(*self.seen)

    def replay(self):
        return self.captured


class WritesNothing(Run):
    """Right results, from a graph that leaves the state to whoever comes next."""

    def replay(self):
        before = self.state.clone()
        results = super().replay()
        self.state.copy_(before)
        return results | {STATE: before}


class Gaps(Run):
    def buffers(self):
        return {INDEX: torch.zeros(self.rows, 2)[:, 0]}


class Padded(Run):
    """Nothing to try with odd seeds."""

    def prepare(self, seed):
        return super().prepare(seed) and seed % 2 == 0


class DraftsOff(Run):
    def replay(self):
        results = super().replay()
        results[DRAFTS][0] += 1
        return results


def found(*runs):
    return [(d.run, d.part.what) for d in verify(runs)]


def test_graphs_that_are_their_eager_steps_pass():
    runs = [Run(requests, depth) for requests in (1, 2, 8) for depth in (0, 1, 3)]
    assert found(*runs) == []
    enforce([])
    assert runs[0].calls == [("prepare", 0), "replay", "eager", ("prepare", 1), "replay", "eager"]


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (OneUlp, {"hidden states"}),
        (Stale, {"hidden states", "state", "drafts"}),
        (Deaf, {"hidden states", "state", "drafts"}),
        (WritesNothing, {"state"}),
        (Gaps, {"index"}),
        (DraftsOff, {"drafts"}),
    ],
)
def test_one_bad_graph_among_good_ones_is_named(cls, what):
    bad = cls()
    assert {name for name, _ in found(Run(16, 1), bad, Run(1, 0))} == {bad.name}
    assert {part for _, part in found(cls())} == what


def test_nothing_stops_the_other_runs():
    """Two ranks make the same collective calls whatever one of them finds."""
    last = Run(1, 0)
    assert found(OneUlp(), last)
    assert last.calls[-1] == "eager"


def test_a_seed_with_nothing_to_try():
    run = Padded()
    assert found(run) == []
    assert run.calls == [("prepare", 0), "replay", "eager", ("prepare", 1)]


def test_bits_are_compared():
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.zeros(3)
    assert difference(nan, nan.clone()) is None
    assert difference(-zero, zero) == "3 of 3 rows"
    assert difference(zero, zero[:2]) == "torch.float32 (3,), not torch.float32 (2,)"
    assert "torch.float16" in difference(zero.half(), zero)
    assert difference(torch.zeros(0), torch.zeros(0)) is None
    assert difference(torch.tensor(1), torch.tensor(2)) == "1 of 1 rows"


def test_the_sentence_names_size_depth_and_what_to_do():
    with pytest.raises(GraphError) as error:
        enforce(verify([OneUlp(), *(Stale(n) for n in (2, 4))]))
    sentence = str(error.value)
    assert "hidden states of the target (1 of 32 rows) for 8 requests of 4 tokens" in sentence
    assert "and 4 more; set VLLM_B70_GRAPHS=off" in sentence and "\n" not in sentence
    with pytest.raises(GraphError, match="drafts of the drafter .* set VLLM_B70_GRAPHS=target"):
        enforce(verify([DraftsOff()]))
