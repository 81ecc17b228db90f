"""Our scheduler classes: both vLLM schedulers get the grid; the trace tells prompt from decode."""

import json
import types

import pytest

pytest.importorskip("vllm")
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_b70.scheduling.scheduler import AsyncChunkGridScheduler, ChunkGridScheduler
from vllm_b70.scheduling.step_trace import StepTrace
from vllm_b70.speculation.depth_counts import DepthCounts, receive
from vllm_b70.speculation.draft_lag import DraftLag

CLASSES = [(ChunkGridScheduler, Scheduler), (AsyncChunkGridScheduler, AsyncScheduler)]


def bare(cls):
    scheduler = object.__new__(cls)
    scheduler._cuts, scheduler._trace, scheduler.requests = 0, None, {}
    scheduler._states, scheduler._cut_to, scheduler.num_spec_tokens = [], None, 0
    scheduler._counts, scheduler._lag = DepthCounts(), DraftLag(3)
    return scheduler


def request(computed, prompt):
    return types.SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=prompt)


@pytest.mark.parametrize(("cls", "base"), CLASSES)
def test_the_hook_of_vllm_is_the_grid(cls, base):
    assert issubclass(cls, base)
    scheduler = bare(cls)
    assert scheduler._mamba_block_aligned_split(request(0, 500), 200) == 192
    assert scheduler._mamba_block_aligned_split(request(64, 500), 100, 0, 0) == 64
    assert scheduler._mamba_block_aligned_split(request(0, 500), 200, 64, 0) == 192
    assert scheduler._mamba_block_aligned_split(request(500, 500), 4) == 4
    assert scheduler._cuts == 3


@pytest.mark.parametrize(("cls", "base"), CLASSES)
def test_the_hook_is_switched_on_after_vllm_decided(cls, base, monkeypatch):
    def init(self):
        self.need_mamba_block_aligned_split = False
        self.dynamic_sd_lookup, self.num_spec_tokens = None, 0

    monkeypatch.setattr(base, "__init__", init)
    assert cls().need_mamba_block_aligned_split is True


@pytest.mark.parametrize(("cls", "base"), CLASSES)
def test_a_chunk_that_an_image_cut_short_is_put_on_the_grid(cls, base, monkeypatch):
    monkeypatch.setattr(
        base, "_try_schedule_encoder_inputs", lambda self, *a: ([1], 100, 7, [], [])
    )
    got = bare(cls)._try_schedule_encoder_inputs(request(64, 500), 64, 300, 10)
    assert got == ([1], 64, 7, [], [])


@pytest.mark.parametrize(("cls", "base"), CLASSES)
def test_a_step_is_recorded_as_it_was_scheduled(cls, base, monkeypatch, tmp_path):
    scheduler = bare(cls)
    scheduler._trace, scheduler._cuts = StepTrace(tmp_path / "trace"), 1
    # vLLM has advanced num_computed_tokens by the time schedule() returns.
    scheduler.requests = {"a": request(192, 500), "b": request(14, 10), "c": request(11, 10)}
    output = types.SimpleNamespace(
        num_scheduled_tokens={"a": 64, "b": 4, "c": 1}, preempted_req_ids={"d"}
    )
    monkeypatch.setattr(base, "schedule", lambda self, throttle_prefills=False: output)
    assert scheduler.schedule() is output and scheduler._cuts == 0
    assert json.loads((tmp_path / "trace").read_text()) == {
        "step": 0,
        "requests": 3,
        "prompt_tokens": 64,
        "widths": {"1": 1, "4": 1},
        "preempted": 1,
        "cuts": 1,
    }


@pytest.mark.parametrize(("cls", "base"), CLASSES)
def test_depths_and_what_the_drafter_does_are_counted(cls, base, monkeypatch):
    scheduler = bare(cls)
    scheduler.num_spec_tokens, scheduler.dynamic_sd_lookup = 3, [0, 3, 0]
    scheduler.requests = {"a": request(11, 10), "b": request(14, 10)}

    def step(depth, **widths):
        output = types.SimpleNamespace(
            num_scheduled_tokens=widths, num_spec_tokens_to_schedule=depth, finished_req_ids=set()
        )
        monkeypatch.setattr(base, "schedule", lambda self, throttle_prefills=False: output)
        scheduler.schedule()

    step(0, a=1, b=4)
    step(0, a=1, b=1)
    scheduler._cut_to = 1
    step(3, a=1)
    monkeypatch.setattr(base, "make_spec_decoding_stats", lambda self, *a: "stats")
    monkeypatch.setattr(
        base, "make_stats", lambda self, *a: types.SimpleNamespace(num_kv_fetch_reqs_by_stage={})
    )
    assert scheduler.make_spec_decoding_stats(None, 3, 2, None, "a") == "stats"
    sent = scheduler.make_stats().num_kv_fetch_reqs_by_stage
    assert {(name, *labels): count for name, labels, count in receive(sent)} == {
        ("draft_depth_steps", "0", "schedule"): 2,
        ("draft_depth_steps", "1", "blocks"): 1,
        ("draft_depth_steps", "3", "schedule"): 1,
        ("draft_layer_skipped_steps",): 2,
        ("draft_layer_caught_up_steps",): 1,
        ("drafts", "3"): 1,
        ("accepted_draft_tokens", "3", "0"): 1,
        ("accepted_draft_tokens", "3", "1"): 1,
    }
    assert not scheduler.make_stats().num_kv_fetch_reqs_by_stage, "sent once"
