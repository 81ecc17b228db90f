"""State slots by depth: how many, and that nobody is preempted for them, on vLLM's manager."""

import types

import pytest

from vllm_b70.scheduling.state_blocks import deepest_that_fits, reserved_depths, state_blocks
from vllm_b70.speculation.schedule import depth_by_batch

SCHEDULE = [[1, 8, 3], [9, 16, 1], [17, 64, 0]]


def test_the_reserve_is_for_this_and_every_larger_batch():
    assert reserved_depths([0, 3, 1, 2, 0]) == [0, 3, 2, 2, 0]
    assert reserved_depths([0, 0, 0, 3]) == [0, 3, 3, 3]


def test_blocks_saved_at_64_users():
    depths = depth_by_batch(SCHEDULE, 64)
    assert state_blocks(depths, 64) == 64 + 8 * 3 + 8 * 1
    static = state_blocks([0, *[3] * 64], 64)
    assert (static, static - state_blocks(depths, 64)) == (256, 160)


@pytest.mark.parametrize(("free", "depth"), [(9, 3), (8, 2), (2, 0), (1, 0)])
def test_the_deepest_that_fits(free, depth):
    assert deepest_that_fits([2, 4, 6, 9], free) == depth


vllm = pytest.importorskip("vllm")

BLOCK, GROUPS = 16, 2


def scheduler(blocks, schedule=SCHEDULE, states=GROUPS):
    """Our scheduler with vLLM's cache manager: one group of attention, some of state."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.request_queue import SchedulingPolicy
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    from vllm_b70.scheduling.scheduler import ChunkGridScheduler

    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    state = MambaSpec(
        block_size=256, shapes=((8,),), dtypes=(torch.float32,), num_speculative_blocks=3
    )
    groups = [KVCacheGroupSpec(["a"], attention)]
    groups += [KVCacheGroupSpec([f"s{i}"], state) for i in range(states)]
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=256,
        scheduler_block_size=256,
        hash_block_size=BLOCK,
        max_in_flight_tokens=512,
        enable_caching=False,
    )

    class Made(ChunkGridScheduler):
        pass

    def init(self):
        self.kv_cache_manager, self.policy = manager, SchedulingPolicy.FCFS
        self.dynamic_sd_lookup = schedule and depth_by_batch(schedule, 64)
        self.num_spec_tokens, self.num_lookahead_tokens = 3, 1
        self.max_model_len, self.max_num_scheduled_tokens, self.running = 256, 512, []

    original, Scheduler.__init__ = Scheduler.__init__, init
    try:
        return Made()
    finally:
        Scheduler.__init__ = original


def request(name, prompt=8, computed=0, drafts=0):
    from vllm.v1.request import RequestStatus

    return types.SimpleNamespace(
        request_id=name, num_prompt_tokens=prompt, num_computed_tokens=computed,
        num_tokens=max(prompt, computed + 1), num_output_placeholders=0,
        spec_token_ids=[-1] * drafts, status=RequestStatus.RUNNING, num_in_flight_tokens=0,
        skip_reading_prefix_cache=False, num_preemptions=0, block_hashes=[],
    )  # fmt: skip


def states(made, name):
    counts = {len(state.req_to_blocks[name]) for state in made._states}
    assert len(counts) == 1
    return counts.pop()


def begin_step(made):
    """What schedule() does before vLLM's own."""
    made._fit_drafts()


def start(made, count, reserving=True):
    begin_step(made)
    for i in range(count):
        if not reserving:
            made._placed = 40
        r = request(f"r{i}")
        assert made.kv_cache_manager.allocate_slots(r, 8, num_lookahead_tokens=1)
        r.num_computed_tokens, r.num_tokens = 8, 9
        made.running.append(r)


def test_each_request_holds_what_its_place_asks_for():
    made = scheduler(1000)
    start(made, 20)
    assert [states(made, f"r{i}") for i in range(20)] == [4] * 8 + [2] * 8 + [1] * 4


def test_without_a_schedule_vllm_reserves_for_everybody():
    """If the numbers with a schedule above are these, compat/state_blocks.py can go."""
    made = scheduler(1000, schedule=None)
    assert not made._states
    assert made.kv_cache_manager.allocate_slots(request("r"), 8, num_lookahead_tokens=1)
    mamba = made.kv_cache_manager.coordinator.single_type_managers[1:]
    assert [len(state.req_to_blocks["r"]) for state in mamba] == [4, 4]


def test_a_model_without_recurrent_layers_has_nothing_to_reserve():
    made = scheduler(1000, states=0)
    assert not made._states
    assert made.kv_cache_manager.allocate_slots(request("r"), 8, num_lookahead_tokens=1)


def test_a_request_that_moves_up_gets_more():
    made = scheduler(1000)
    start(made, 20)
    for gone in made.running[:12]:
        made.kv_cache_manager.coordinator.free(gone.request_id)
    del made.running[:12]
    begin_step(made)
    for r in made.running:
        assert made.kv_cache_manager.allocate_slots(r, 1, num_lookahead_tokens=1)
    assert [states(made, r.request_id) for r in made.running] == [4] * 8


def test_rows_past_the_prompt_have_slots_whatever_the_place():
    made = scheduler(1000)
    start(made, 20)
    begin_step(made)
    made._placed = 30
    last = made.running[-1]
    assert made.kv_cache_manager.allocate_slots(last, 3, num_lookahead_tokens=1)
    assert states(made, last.request_id) == 3
    assert made.kv_cache_manager.allocate_slots(last, 90, num_lookahead_tokens=1)
    assert states(made, last.request_id) == 4, "a replay keeps its last states"


def test_drafts_are_shortened_rather_than_somebody_preempted():
    # Two requests, each a block of attention and a state in two groups; three blocks are free.
    made = scheduler(2 * 3 + 3)
    start(made, 2, reserving=False)
    assert [states(made, "r0"), states(made, "r1")] == [1, 1]
    for r in made.running:
        r.spec_token_ids = [-1] * 3
    begin_step(made)
    for r in made.running:
        rows = 1 + len(r.spec_token_ids)
        assert made.kv_cache_manager.allocate_slots(r, rows, num_lookahead_tokens=1)
        assert states(made, r.request_id) >= rows
    assert {len(r.spec_token_ids) for r in made.running} == {0}
    made.kv_cache_manager.coordinator.free("r1")
    (first, _), made.running = made.running, made.running[:1]
    first.spec_token_ids = [-1] * 3
    begin_step(made)
    assert len(first.spec_token_ids) == 3


def test_a_reserve_never_takes_what_a_later_request_needs():
    made = scheduler(2 * 3 + 2)
    start(made, 2, reserving=False)
    for r in made.running:
        r.num_computed_tokens, r.num_tokens = 15, 16
    # Both need a second block of attention now, and two are free: no slot for a draft to come.
    begin_step(made)
    for r in made.running:
        assert made.kv_cache_manager.allocate_slots(r, 1, num_lookahead_tokens=1)
    assert [states(made, "r0"), states(made, "r1")] == [1, 1]


def test_admission_keeps_the_static_bound():
    from vllm.v1.request import RequestStatus

    for blocks, admitted in ((1 + 4 * GROUPS - 1, False), (1 + 4 * GROUPS, True)):
        made = scheduler(blocks)
        begin_step(made)
        made._placed = 40
        r = request("new")
        r.status = RequestStatus.WAITING
        got = made.kv_cache_manager.allocate_slots(
            r, 8, num_lookahead_tokens=1, full_sequence_must_fit=True
        )
        assert (got is not None) is admitted
        if admitted:
            assert states(made, "new") == 1
