"""How vLLM keys its graphs, on its own manager: by tokens, requests and the tokens of each; what
``complete`` adds to that; which sizes fit where memory ends."""

import types

import pytest
import torch

pytest.importorskip("vllm")
import vllm.platforms  # noqa: F401
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_b70.graphs import capture_set
from vllm_b70.graphs.steps import Case, cases

REQUESTS = 16
SIZES = [1, 2, 4, 8, 10, 16, 24, 32, 64]


@pytest.fixture
def make(monkeypatch):
    """Makes a manager for a schedule of depths, as if all its graphs were captured."""
    monkeypatch.setattr(
        cudagraph_utils,
        "get_pp_group",
        lambda: types.SimpleNamespace(is_first_rank=True, is_last_rank=True),
    )
    monkeypatch.setattr(
        cudagraph_utils,
        "current_platform",
        types.SimpleNamespace(get_global_graph_pool=lambda: (0, 0)),
    )

    def manager(schedule, sizes=SIZES, most=3):
        speculative = types.SimpleNamespace(
            num_speculative_tokens_per_batch_size=schedule,
            uses_dynamic_speculative_decoding=lambda: True,
        )
        config = types.SimpleNamespace(
            scheduler_config=types.SimpleNamespace(max_num_seqs=REQUESTS),
            compilation_config=types.SimpleNamespace(
                cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
            ),
            parallel_config=types.SimpleNamespace(tensor_parallel_size=1),
            cache_config=types.SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=speculative,
            num_speculative_tokens=most,
        )
        made = cudagraph_utils.CudaGraphManager(
            config, torch.device("cpu"), CUDAGraphMode.FULL_DECODE_ONLY, most + 1
        )
        made._graphs_captured = True
        made.graphs = dict.fromkeys(capture_set.planned(made))
        return made

    return manager


def graph(manager, requests, width):
    """What a step of so many requests runs from: (requests, tokens), or None."""
    found = manager.dispatch(requests, requests * width, width, 0)
    full = found.cg_mode is CUDAGraphMode.FULL
    return (found.num_reqs, found.num_tokens) if full else None


@pytest.mark.parametrize("completed", [False, True])
def test_a_graph_serves_its_own_width_only(make, completed):
    """The shapes of step 10: 8 requests of 4 tokens are not 16 of 2."""
    manager = make([[1, 8, 3], [9, 16, 1]])
    if completed:
        capture_set.complete(manager)
    assert graph(manager, 8, 4) == (8, 32) and graph(manager, 16, 2) == (16, 32)
    keys = {(key.num_reqs, key.num_tokens, key.uniform_token_count) for key in manager.graphs}
    assert {(8, 32, 4), (16, 32, 2)} <= keys
    for width in (1, 3):
        assert graph(manager, 4, width) is None
    mixed = manager.dispatch(4, 10, None, 0)
    assert mixed.cg_mode is CUDAGraphMode.NONE


def test_a_step_in_a_gap_of_its_width_runs_from_the_next_graph(make):
    manager = make([[1, 8, 3], [9, 16, 1]])
    # vLLM as it is: 12 tokens find the graph of 3 requests of 4, and no other.
    assert graph(manager, 6, 2) is None
    capture_set.complete(manager)
    assert graph(manager, 6, 2) == (8, 16)


def test_a_graph_that_is_withheld_serves_no_step(make):
    manager = make([[1, 8, 3], [9, 16, 1]])
    capture_set.complete(manager)
    capture_set.keep(manager, lambda key: key.num_reqs != 8)
    assert graph(manager, 8, 4) is None and graph(manager, 16, 2) == (16, 32)


@pytest.mark.parametrize(
    "schedule", [[[1, 2, 3], [3, 8, 1], [9, 16, 0]], [[1, 16, 2]], [[1, 3, 3], [4, 16, 2]]]
)
def test_every_step_has_the_smallest_graph_of_its_width(make, schedule):
    manager = make(schedule)
    before = {
        (requests, width): graph(manager, requests, width)
        for width in range(1, 5)
        for requests in range(1, REQUESTS + 1)
    }
    capture_set.complete(manager)
    for (requests, width), was in before.items():
        fitting = [
            (key.num_reqs, key.num_tokens)
            for key in manager.graphs
            if key.uniform_token_count == width and key.num_reqs >= requests
        ]
        best = min(fitting, default=None)
        assert graph(manager, requests, width) == best
        assert was in (None, best), "vLLM's own choice is kept"


def test_other_adapters_keep_their_own(make):
    manager = make([[1, 16, 1]])
    assert {adapters for _, adapters in manager._candidates} == {0}
    capture_set.complete(manager)
    assert manager.dispatch(2, 4, 2, 1).cg_mode is CUDAGraphMode.NONE


def test_the_cases_replay_every_graph(make):
    schedule = [[1, 2, 3], [3, 8, 1], [9, 16, 0]]
    target = make(schedule)
    decode = [
        types.SimpleNamespace(num_reqs=n, num_active_loras=0, num_speculative_tokens=k)
        for n in (1, 2, 4, 8, 10, 16)
        for k in (3,)
    ]
    work = cases(target.graphs, target.graphs, decode, 3)
    shapes = {(case.requests, case.width) for case in work}
    assert {(key.num_reqs, key.uniform_token_count) for key in target.graphs} <= shapes
    assert {(case.requests, case.depth) for case in work} >= {(k.num_reqs, 3) for k in decode}
    assert len(work) == len(set(work)) == len(shapes)
    assert Case(2, 4, 3) in work and Case(8, 2, 1) in work and Case(16, 1, 3) in work
    # Without speculation there is nothing to draft.
    alone = [types.SimpleNamespace(num_reqs=4, uniform_token_count=1, num_active_loras=0)]
    assert cases(alone, [], [], 0) == [Case(4, 1, 0)]


def test_graphs_of_any_mix_of_widths_are_refused():
    key = types.SimpleNamespace(num_reqs=4, uniform_token_count=None, num_active_loras=0)
    with pytest.raises(RuntimeError, match="leave enable_adaptive_verification out"):
        cases([key], [], [], 3)


def test_the_sizes_that_fit(make):
    keys = capture_set.planned(make([[1, 8, 3], [9, 16, 1]]))
    for captured in range(len(keys) + 1):
        sizes = capture_set.sizes_that_fit(SIZES, keys, captured)
        again = capture_set.planned(make([[1, 8, 3], [9, 16, 1]], sizes)) if sizes else []
        assert len(again) <= captured, "no more graphs than there was room for"
        assert sizes == SIZES[: len(sizes)]
    assert capture_set.sizes_that_fit(SIZES, keys, len(keys)) == SIZES


@pytest.mark.parametrize(
    ("captured", "advice"),
    [
        (0, "no size fits: use --max-cudagraph-capture-size below 64"),
        (9, "these sizes fit: use --cudagraph-capture-sizes 1 2 4 8 10 16"),
        (99, "all of the target's fit: set VLLM_B70_GRAPHS=target"),
    ],
)
def test_out_of_memory_is_one_sentence(make, captured, advice):
    manager = make([[1, 8, 3], [9, 16, 1]])
    keys = capture_set.planned(manager)
    manager.graphs = dict.fromkeys(keys[:captured])
    error = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 3 GiB")
    sentence = str(capture_set.out_of_memory(SIZES, manager, error))
    assert advice in sentence and "CUDA out of memory." in sentence and "\n" not in sentence
    assert f"{min(captured, len(keys))} of the target's {len(keys)}" in sentence


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("level_zero backend failed: UR_RESULT_ERROR_OUT_OF_RESOURCES"), True),
        (RuntimeError("UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"), True),
        (RuntimeError("an illegal memory access"), False),
        (ValueError("OUT_OF_RESOURCES"), False),
    ],
)
def test_how_devices_say_that_they_are_full(error, full):
    assert capture_set.is_out_of_memory(error) is full
