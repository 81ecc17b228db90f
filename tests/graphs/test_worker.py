"""What a worker puts around its runner's captures, over runners that do nothing else."""

import types
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("vllm")
import vllm.platforms  # noqa: F401
from vllm.config import CUDAGraphMode

from vllm_b70.graphs import capture_set, recording, steps, worker
from vllm_b70.graphs.verify import Difference, GraphError, Part
from vllm_b70.settings import Settings


class Drafter:
    prefill_cudagraph_manager = decode_cudagraph_manager = None

    def __init__(self):
        self.modes = []

    def init_cudagraph_manager(self, cudagraph_mode):
        self.modes.append(cudagraph_mode)


class Runner:
    num_speculative_steps = 3
    device = torch.device("cpu")

    def __init__(self, error=None):
        self.error, self.calls = error, []
        self.speculator = Drafter()
        self.cudagraph_manager = types.SimpleNamespace(graphs={}, _capture_descs={})
        self.compilation_config = types.SimpleNamespace(cudagraph_capture_sizes=[1, 2])

    def capture_model(self, *, profile_only=False):
        self.calls.append(("capture", profile_only))
        if self.error is not None:
            raise self.error
        return 77


@pytest.fixture
def make(monkeypatch):
    """Makes a worker's runner, with what it calls written down."""

    def guarded(device):
        return recording._replaced(torch.cuda, "graph", "guarded")

    monkeypatch.setattr(recording, "guarded", guarded)

    def make(graphs=None, **change):
        monkeypatch.setattr(worker, "current", lambda: Settings(graphs=graphs))
        runner = Runner(**change)
        monkeypatch.setattr(
            capture_set, "complete", lambda manager: runner.calls.append("complete")
        )
        monkeypatch.setattr(worker, "verify_runner", lambda r: runner.calls.append("verify"))
        base = type("Base", (), {"_make_model_runner": lambda self: runner})
        return type("Worker", (worker.GraphsMixin, base), {})()._make_model_runner()

    return make


def test_what_is_captured_is_verified_and_what_is_measured_is_not(make):
    runner = make()
    assert runner.capture_model(profile_only=True) == 77
    assert runner.calls == ["complete", ("capture", True)]
    assert runner.capture_model() == 77
    assert runner.calls[2:] == ["complete", ("capture", False), "verify"]


@pytest.mark.parametrize(
    ("graphs", "mode"), [(None, "FULL"), ("all", "FULL"), ("target", CUDAGraphMode.NONE)]
)
def test_the_drafter_is_left_eager_by_a_switch(make, graphs, mode):
    runner = make(graphs)
    runner.speculator.init_cudagraph_manager("FULL")
    assert runner.speculator.modes == [mode]


def test_a_device_without_room(make):
    runner = make(error=torch.OutOfMemoryError("no room"))
    with pytest.raises(GraphError, match="no room on the device for all graphs"):
        runner.capture_model()
    # vLLM measures what it can get; its own word is the better one there.
    with pytest.raises(torch.OutOfMemoryError):
        runner.capture_model(profile_only=True)
    with pytest.raises(ZeroDivisionError):
        make(error=ZeroDivisionError()).capture_model()


class Steps:
    closed = 0

    def __init__(self, runner, most):
        self.runner, self.most, self.requests = runner, most, range(most)

    def close(self):
        Steps.closed += 1


@dataclass(frozen=True)
class Key:
    num_reqs: int
    uniform_token_count: int
    num_active_loras: int = 0


def keys(*shapes):
    return [Key(*shape) for shape in shapes]


@pytest.mark.parametrize("differences", [0, 1])
def test_the_requests_are_gone_whatever_was_found(monkeypatch, differences, caplog):
    wrong = Difference("8 requests", Part("target", "hidden states"), "1 of 8 rows")
    monkeypatch.setattr(steps, "Steps", Steps)
    target, prefill, decode = keys((8, 1), (4, 1)), keys((8, 1), (4, 1)), keys((8, 1), (4, 1))
    monkeypatch.setattr(steps, "captured", lambda runner: (target, prefill, decode))
    asked = []

    def verify(runs):
        asked.extend(runs)
        for run in runs[1:]:
            run.seen, run.replayed = 1, run.graphs()
        # A padded step of the larger size, whose drafts went another way.
        runs[0].seen, runs[0].replayed = 1, {(0, target[0]), (1, prefill[0])}
        return [wrong] * differences

    monkeypatch.setattr("vllm_b70.graphs.verify.verify", verify)
    withheld = []
    monkeypatch.setattr(worker, "withhold", lambda runner, which: withheld.append(which))
    before = Steps.closed
    with caplog.at_level("INFO", "vllm.vllm_b70"):
        if differences:
            with pytest.raises(GraphError, match="hidden states of the target"):
                worker.verify_runner(Runner())
        else:
            worker.verify_runner(Runner())
            unseen = "8 requests of 1 tokens (depth 0, then 3 drafts each)"
            assert f"such steps run without one: {unseen}" in caplog.text
            assert "2 of the target and 3 of the drafter" in caplog.text
            assert withheld == [[[], [], keys((8, 1))]]
    assert Steps.closed == before + 1 and [run.case.requests for run in asked] == [8, 4]


def test_a_runner_without_graphs_makes_no_requests(monkeypatch):
    monkeypatch.setattr(steps, "captured", lambda runner: ([], [], []))
    monkeypatch.setattr(steps, "Steps", None)
    worker.verify_runner(Runner())


def test_no_room_to_verify_is_one_sentence(make, monkeypatch):
    def verify(runner):
        raise torch.OutOfMemoryError("no room")

    runner = make()
    monkeypatch.setattr(worker, "verify_runner", verify)
    with pytest.raises(GraphError, match="no room on the device to verify its graphs"):
        runner.capture_model()


def test_what_was_not_verified_is_not_served():
    def manager(*shapes):
        made = types.SimpleNamespace(_candidates={(8, 0): keys(*shapes), (4, 0): []})
        made.left = lambda: [
            (k.num_reqs, k.uniform_token_count)
            for found in made._candidates.values()
            for k in found
        ]
        return made

    target, prefill, decode = manager((8, 1), (4, 2)), manager((8, 1), (4, 2)), manager((8, 1))
    speculator = types.SimpleNamespace(
        prefill_cudagraph_manager=prefill, decode_cudagraph_manager=decode
    )
    runner = types.SimpleNamespace(cudagraph_manager=target, speculator=speculator)
    worker.withhold(runner, [keys((8, 1)), [], keys((8, 1))])
    assert (target.left(), prefill.left(), decode.left()) == ([(4, 2)], [(8, 1), (4, 2)], [])


def test_graphs_that_ran_are_noted_by_part():
    class Manager:
        def __init__(self):
            self.ran = []

        def run_fullgraph(self, key):
            self.ran.append(key)
            return "hidden states"

    target, decode = Manager(), Manager()
    runner = types.SimpleNamespace(
        cudagraph_manager=target, speculator=types.SimpleNamespace(decode_cudagraph_manager=decode)
    )
    with steps.replays(runner) as ran:
        assert target.run_fullgraph(Key(8, 1)) == "hidden states"
        decode.run_fullgraph(Key(4, 1))
    target.run_fullgraph(Key(2, 1))
    assert ran == {(0, Key(8, 1)), (2, Key(4, 1))}
    assert target.ran == [Key(8, 1), Key(2, 1)] and "run_fullgraph" not in vars(target)


@pytest.mark.parametrize(
    ("requests", "ran", "whose"),
    [
        (8, {0, 1, 2}, None),
        (8, {1, 2}, "target has .*VLLM_B70_GRAPHS=off"),
        (8, {0, 2}, "drafter has .*VLLM_B70_GRAPHS=target"),
        (8, {0, 1}, "drafter has .*VLLM_B70_GRAPHS=target"),
        # One request fewer, whose drafts may come from a smaller graph.
        (7, {0, 1}, None),
        (7, {0}, "drafter has"),
    ],
)
def test_a_step_that_did_not_run_from_its_graphs_is_refused(requests, ran, whose, monkeypatch):
    """Else two eager steps would be compared with one another."""
    shapes = [keys((8, 4), (8, 2)), keys((8, 4), (4, 4)), keys((8, 1), (4, 1))]
    monkeypatch.setattr(steps, "captured", lambda runner: shapes)
    rig = types.SimpleNamespace(
        runner=None, randomise=lambda seed: None, restore=lambda *_: None, step=lambda *_: {},
        replayed={(number, shapes[number][0]) for number in ran},
    )  # fmt: skip
    run = steps.StepRun(rig, steps.Case(8, 4, 3))
    run.requests, run.seed, run.columns, run.rejected = [None] * requests, 0, [], []
    if whose is None:
        assert run.replay() == {} and run.replayed == rig.replayed
        with pytest.raises(GraphError, match="a step of 8 requests .* from a graph"):
            run.eager()
    else:
        with pytest.raises(GraphError, match=f"the {whose}"):
            run.replay()
