"""The V2 speculator over a fake of vLLM's: what it leaves out, it writes later, and nothing else.

The fake draft layer has vLLM's own contract: it writes a token and a hidden state where the slot
mapping says. A script of requests runs through it, and the cache is compared with the one that a
speculator which never skips has written.
"""

import types

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
import transformers  # noqa: F401  (before vLLM's model runner, which imports it in a circle)

from vllm_b70.speculation import speculator as module
from vllm_b70.speculation.draft_lag import WINDOW

SLOTS, HIDDEN, BLOCK, DEPTH, TOKENS = 4, 8, 16, 3, 64


class Stock:
    """What vLLM's speculator has of state, and a propose that runs the draft layer."""

    def __init__(self, vllm_config, device):
        self.num_speculative_steps, self.max_num_reqs = DEPTH, SLOTS
        self.max_num_tokens, self.hidden_size = TOKENS, HIDDEN
        self.dtype, self.device = torch.float32, device
        self.input_buffers = types.SimpleNamespace(
            input_ids=torch.zeros(TOKENS, dtype=torch.int32),
            positions=torch.zeros(TOKENS, dtype=torch.int64),
        )
        self.hidden_states = torch.zeros(TOKENS, HIDDEN)
        self.last_token_indices = self.current_draft_step = None
        self.draft_tokens = torch.zeros(SLOTS, DEPTH, dtype=torch.int64)
        self.draft_attn_layer_names = {"draft"}
        self.kv_cache_config = types.SimpleNamespace(
            kv_cache_groups=[
                types.SimpleNamespace(layer_names=["target"]),
                types.SimpleNamespace(layer_names=["draft"]),
            ]
        )
        blocks = torch.randperm(SLOTS * 40, generator=torch.Generator().manual_seed(0))
        table = types.SimpleNamespace(gpu=blocks.view(SLOTS, 40).int())
        self.block_tables = types.SimpleNamespace(
            block_tables=[None, table], block_sizes=[None, BLOCK]
        )
        self.cache, self.ran = {}, []

    def _run_model(self, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp):
        assert attn_metadata is None
        self.ran.append(num_tokens)
        self.write(slot_mappings["draft"], num_tokens)

    def write(self, slots, count):
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                row = self.input_buffers.input_ids[i].item(), self.hidden_states[i].tolist()
                self.cache[slot] = (self.input_buffers.positions[i].item(), *row)

    def propose(self, batch, attn, slots, hidden, aux, sampled, rejected, last, *rest, **named):
        prepare(None, None, self.input_buffers, batch, sampled, rejected, last, None, SLOTS)
        self.hidden_states[: batch.num_tokens] = hidden[: batch.num_tokens]
        self.write(slots["draft"], batch.num_tokens)
        return self.draft_tokens[: batch.num_reqs].fill_(7)


class Skipping(module.SkippingSpeculator, Stock):
    pass


def prepare(_, __, buffers, batch, sampled, rejected, last, ___, ____):
    """vLLM's kernel in plain torch: inputs shifted by one, the sampled token at the end."""
    for i in range(batch.num_reqs):
        first, end = batch.query_start_loc[i : i + 2].tolist()
        final = end - 1 - rejected[i].item()
        buffers.input_ids[first:final] = batch.input_ids[first + 1 : final + 1]
        buffers.input_ids[final] = last[batch.idx_mapping[i], 0]
        buffers.positions[first : final + 1] = batch.positions[first : final + 1]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(module, "prepare_prefill_inputs", prepare)


class Script:
    """Feeds the same steps to a speculator that skips and to one that does not."""

    def __init__(self):
        self.both = [make(None, torch.device("cpu")) for make in (Skipping, Stock)]
        self.at = {}
        self.random = np.random.default_rng(1)

    def step(self, rows, depth, prompts=()):
        """``rows``: for each slot, rows of this step and how many of them are rejected."""
        slots = list(rows)
        widths = [width for width, _ in rows.values()]
        starts = np.cumsum([0, *widths])
        positions = np.concatenate(
            [np.arange(self.at.get(s, 0), self.at.get(s, 0) + rows[s][0]) for s in slots]
        )
        count = len(positions)
        hidden = torch.from_numpy(self.random.standard_normal((count + 2, HIDDEN))).float()
        batch = types.SimpleNamespace(
            num_reqs=len(slots),
            num_tokens=count,
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping_np=np.array(slots, np.int32),
            num_scheduled_tokens=np.array(widths, np.int32),
            is_prefilling_np=np.array([s in prompts for s in slots]),
            query_start_loc=torch.from_numpy(starts).int(),
            # Two rows that pad a graph.
            positions=torch.from_numpy(np.append(positions, [0, 0])),
            input_ids=torch.from_numpy(self.random.integers(1, 99, count + 2)).int(),
        )
        owners = torch.from_numpy(np.repeat(slots, widths))
        rejected = torch.tensor([dropped for _, dropped in rows.values()])
        last = torch.from_numpy(self.random.integers(1, 99, (SLOTS, 1)))
        drafts = []
        for made in self.both:
            table = made.block_tables.block_tables[1].gpu
            where = module.kv_slots(table, owners, batch.positions[:count], BLOCK)
            drafts.append(
                made.propose(
                    batch, {}, {"draft": where}, hidden, None, None, rejected, last, None, None,
                    None, num_speculative_tokens=depth,
                )
            )  # fmt: skip
        for slot, (width, dropped) in rows.items():
            self.at[slot] = self.at.get(slot, 0) + width - dropped
        return drafts[0]

    def missing(self, slot, count=None):
        """Positions of ``slot`` that the skipping speculator's cache lacks or has otherwise."""
        end = self.at[slot]
        positions = torch.arange(max(0, end - count) if count else 0, end)
        skipping, stock = self.both
        table = stock.block_tables.block_tables[1].gpu
        where = module.kv_slots(table, torch.full_like(positions, slot), positions, BLOCK)
        pairs = zip(positions.tolist(), where.tolist(), strict=True)
        return [p for p, slot in pairs if skipping.cache.get(slot) != stock.cache[slot]]


def test_skipped_positions_are_written_when_drafting_resumes():
    script = Script()
    script.step({0: (9, 0), 2: (20, 0)}, 3, prompts=(0, 2))
    # The drafts of the step before are verified here, and some rejected, though none follow.
    drafts = script.step({0: (4, 2), 2: (4, 0)}, 0)
    assert drafts.tolist() == [[-1] * DEPTH] * 2
    for _ in range(30):
        script.step({2: (1, 0), 0: (1, 0)}, 0)
    assert script.missing(0) and script.missing(2) and not script.both[0].ran
    script.step({0: (1, 0), 2: (1, 0)}, 3)
    assert not script.missing(0) and not script.missing(2)
    # 2 * 34 rows in calls of at most TOKENS.
    assert script.both[0].ran == [64, 4]
    script.step({0: (4, 1), 2: (4, 3)}, 3)
    assert script.both[0].ran == [64, 4]


def test_a_rejected_row_does_not_take_the_place_of_another():
    """vLLM leaves its position in the draft layer's inputs as the step before had it."""
    script = Script()
    script.step({0: (9, 0)}, 3, prompts=(0,))
    script.both[0].input_buffers.positions.fill_(script.at[0])
    script.step({0: (4, 3)}, 0)
    script.step({0: (1, 0)}, 3)
    assert not script.missing(0)


def test_a_request_that_sits_out_is_caught_up_when_it_drafts():
    script = Script()
    script.step({0: (9, 0), 1: (9, 0)}, 3, prompts=(0, 1))
    script.step({0: (1, 0), 1: (1, 0)}, 0)
    script.step({1: (1, 0)}, 3)
    assert script.missing(0) == [9] and not script.missing(1)
    script.step({0: (1, 0), 3: (30, 0)}, 0, prompts=(3,))
    assert script.missing(0) == [9], "this step ran: there was a prompt"
    script.step({0: (1, 0), 1: (4, 1)}, 3)
    assert not script.missing(0) and not script.missing(1)


def test_another_request_in_the_slot_gets_nothing_of_the_former():
    script = Script()
    script.step({1: (9, 0)}, 3, prompts=(1,))
    for _ in range(12):
        script.step({1: (1, 0)}, 0)
    script.at[1] = 0  # preempted, or another one
    script.step({1: (5, 0)}, 0, prompts=(1,))
    script.step({1: (1, 0)}, 0)
    skipping = script.both[0]
    before = dict(skipping.cache)
    script.step({1: (1, 0)}, 3)
    assert not script.missing(1)
    changed = [row for slot, row in skipping.cache.items() if before.get(slot) != row]
    assert {row[0] for row in changed} == {5, 6}


def test_beyond_the_window_positions_stay_missing():
    script = Script()
    script.step({0: (9, 0)}, 3, prompts=(0,))
    for _ in range(WINDOW + 20):
        script.step({0: (1, 0)}, 0)
    script.step({0: (1, 0)}, 3)
    assert not script.missing(0, WINDOW + 1)
    assert script.missing(0) == list(range(9, 29))


def test_dummy_and_profiling_runs_leave_no_trace(monkeypatch):
    skipping = Script().both[0]
    monkeypatch.setattr(Stock, "propose", lambda self, *arguments, **named: "stock")
    # A batch that has nothing which the decision reads.
    for flags in ({"dummy_run": True}, {"is_profile": True}):
        drafts = skipping.propose(types.SimpleNamespace(num_reqs=1), *[None] * 10, **flags)
        assert drafts == "stock"


def test_a_rejected_row_is_never_replayed_over_a_later_one():
    """A step that ran has written the position since; the record still had the rejected draft."""
    script = Script()
    script.step({0: (9, 0)}, 3, prompts=(0,))
    script.step({0: (4, 3)}, 0)
    script.step({0: (1, 0)}, 3)
    script.step({0: (4, 3)}, 0)
    script.step({0: (1, 0)}, 3)
    assert not script.missing(0)


def test_nor_over_one_that_ran_beside_a_prompt():
    script = Script()
    script.step({0: (9, 0)}, 3, prompts=(0,))
    script.step({0: (4, 3)}, 0)
    script.step({0: (1, 0), 3: (30, 0)}, 0, prompts=(3,))
    script.step({0: (1, 0)}, 3)
    assert not script.missing(0)
