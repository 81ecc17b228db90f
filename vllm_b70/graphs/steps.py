"""Steps of vLLM's V2 runner for ``verify``: the same step by its graphs and without.

Requests are made and scheduled as vLLM's own warm-up does it, through the runner's entries, in
blocks of the cache that nobody holds yet; so the way from a request to what a graph reads is the
one that serves. The state before a step is kept in a block of its own and put back before each run.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.utils import get_drafter_hidden_states

from vllm_b70.compat.seams import require
from vllm_b70.graphs.capture_set import managers
from vllm_b70.graphs.verify import DRAFTER, INSTEAD, TARGET, GraphError, Part, Tensors

require(
    "graph_key", "graph_dispatch", "graph_replay", "execute_model", "execute_state", "propose_v2",
    "drafter_inputs", "new_request", "cached_requests",
)  # fmt: skip

#: Tokens of the longest prompt; they differ, so that no two requests stand at one position.
PROMPT = 40
#: Blocks of recurrent state that are read or copied at a time.
TOGETHER = 32


@dataclass(frozen=True)
class Request:
    """One request of the verification.

    Attributes:
        name: As the runner knows it.
        tokens: Its prompt.
        blocks: Its blocks of each KV-cache group, as the scheduler would give them.
        kept: For each group of recurrent layers, the block that keeps its state.
    """

    name: str
    tokens: list[int]
    blocks: tuple[list[int], ...]
    kept: dict[int, int]

    @property
    def position(self) -> int:
        """Of the first token after the prompt."""
        return len(self.tokens)


@dataclass(frozen=True)
class Case:
    """A size and a depth.

    Attributes:
        requests: How many.
        width: Tokens of each.
        depth: Draft tokens to make for each afterwards.
    """

    requests: int
    width: int
    depth: int


def cases(target: Any, prefill: Any, decode: Any, depth: int) -> list[Case]:
    """The steps that replay every captured graph at least once.

    Args:
        target: Keys of the target's graphs.
        prefill: Keys of the drafter's first pass.
        decode: Keys of the drafter's further passes.
        depth: Draft tokens at most; 0 without speculation.
    """
    found: dict[tuple[int, int], int] = {}
    for key in [*target, *prefill]:
        if key.num_active_loras == 0:
            width = key.uniform_token_count
            if width is None:
                raise GraphError(
                    "VLLM_B70=1 has no way to verify graphs of adaptive verification: leave "
                    "enable_adaptive_verification out, or set VLLM_B70_GRAPHS=off."
                )
            # Steps of one token come before the first drafts too.
            found[key.num_reqs, width] = width - 1 or depth
    for key in decode:
        drafts = getattr(key, "num_speculative_tokens", depth)
        if key.num_active_loras == 0 and (key.num_reqs, drafts) not in {
            (requests, made) for (requests, _), made in found.items()
        }:
            found.setdefault((key.num_reqs, drafts + 1), drafts)
    return [Case(*shape, drafts) for shape, drafts in sorted(found.items(), reverse=True)]


def captured(runner: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Keys of the graphs of the target and of the drafter's two passes."""
    target, prefill, decode = (
        list(manager.graphs) if manager else [] for manager in managers(runner)
    )
    return target, prefill, decode


@contextmanager
def replays(runner: Any) -> Iterator[set[tuple[int, Any]]]:
    """The graphs that run meanwhile, each by the number of its manager, as ``captured`` has them,
    and its key."""
    found: set[tuple[int, Any]] = set()

    def noting(number: int, run: Any) -> Any:
        def run_fullgraph(key: Any) -> Any:
            found.add((number, key))
            return run(key)

        return run_fullgraph

    given = [(number, manager) for number, manager in enumerate(managers(runner)) if manager]
    for number, manager in given:
        manager.run_fullgraph = noting(number, manager.run_fullgraph)
    try:
        yield found
    finally:
        for _, manager in given:
            del manager.run_fullgraph


class Steps:
    """Requests in the runner, past their prompts, and steps of any of them."""

    def __init__(self, runner: Any, most: int) -> None:
        """
        Args:
            runner: vLLM's, with its graphs captured and nothing scheduled yet.
            most: Requests of the largest step; there may be fewer if the cache has no blocks.
        """
        self.runner = runner
        self.layers = runner.compilation_config.static_forward_context
        self.depth = runner.num_speculative_steps
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        self.recurrent = [g for g, spec in enumerate(specs) if isinstance(spec, MambaSpec)]
        self.drafting: set[str] = getattr(runner.speculator, "draft_attn_layer_names", set())
        self.requests, self._turn = self._allocate(specs, most), 0
        self.replayed: set[tuple[int, Any]] = set()
        self._prefill()

    @property
    def drafts(self) -> bool:
        """Whether the drafter has graphs."""
        return any(captured(self.runner)[1:])

    def others(self, count: int) -> list[Request]:
        """So many requests, each in another place of the batch than in the step before."""
        self._turn = (self._turn + 1) % len(self.requests)
        return (self.requests[self._turn :] + self.requests[: self._turn])[:count]

    def _allocate(self, specs: list[Any], most: int) -> list[Request]:
        draw = random.Random(0)
        room = self.runner.max_model_len - 2 * self.depth - 2
        longest = max(1, min(PROMPT, room))
        vocabulary = self.runner.vocab_size
        free = iter(range(1, self.runner.kv_cache_config.num_blocks))
        requests: list[Request] = []
        while len(requests) < most:
            tokens = [draw.randrange(vocabulary) for _ in range(draw.randint(1, longest))]
            end = len(tokens) + 2 * self.depth + 1
            needs = [
                1 + self.depth if g in self.recurrent else -(-end // spec.block_size)
                for g, spec in enumerate(specs)
            ]
            ids = [i for i, _ in zip(free, range(sum(needs) + len(self.recurrent)), strict=False)]
            if len(ids) < sum(needs) + len(self.recurrent):
                break
            own = iter(ids)
            blocks = tuple([next(own) for _ in range(count)] for count in needs)
            kept = {g: next(own) for g in self.recurrent}
            requests.append(Request(f"_graphs_{len(requests)}_", tokens, blocks, kept))
        return requests

    def _prefill(self) -> None:
        """Compute all prompts, and keep the state after them."""
        budget, waiting = self.runner.max_num_tokens, list(self.requests)
        while waiting:
            now: list[Request] = []
            while waiting and sum(len(r.tokens) for r in [*now, waiting[0]]) <= budget:
                now.append(waiting.pop(0))
            output = SchedulerOutput.make_empty()
            output.num_spec_tokens_to_schedule = self.depth
            output.scheduled_new_reqs = [
                NewRequestData(
                    req_id=request.name,
                    prompt_token_ids=request.tokens,
                    mm_features=[],
                    sampling_params=SamplingParams(temperature=0.0, max_tokens=2),
                    pooling_params=None,
                    block_ids=request.blocks,
                    num_computed_tokens=0,
                    lora_request=None,
                    prefill_token_ids=request.tokens,
                )
                for request in now
            ]
            output.num_scheduled_tokens = {r.name: len(r.tokens) for r in now}
            output.total_num_scheduled_tokens = sum(len(r.tokens) for r in now)
            self.runner.execute_model(output)
            self.runner.sample_tokens(None)
            # vLLM stages what is new of a step in two buffers by turns, for an engine that waits.
            torch.accelerator.synchronize()
        for group in self.recurrent:
            self._copy(
                group,
                [r.blocks[group][0] for r in self.requests],
                [r.kept[group] for r in self.requests],
            )

    def _states(self, group: int) -> Iterator[torch.Tensor]:
        """The caches [blocks, ...] of a group of recurrent layers."""
        for name in self.runner.kv_cache_config.kv_cache_groups[group].layer_names:
            yield from self.layers[name].kv_cache

    def _copy(self, group: int, sources: list[int], targets: list[int]) -> None:
        parts = list(zip(self._parts(sources), self._parts(targets), strict=True))
        for cache in self._states(group):
            for source, target in parts:
                cache[target] = cache[source]

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.runner.device)

    def _parts(self, blocks: list[int]) -> list[torch.Tensor]:
        """Blocks as indices, so many at a time."""
        return [
            self._index(blocks[first : first + TOGETHER])
            for first in range(0, len(blocks), TOGETHER)
        ]

    def _builder(self, group: int) -> Any:
        (attention_group,) = self.runner.attn_groups[group]
        return attention_group.get_metadata_builder()

    def restore(self, requests: list[Request], columns: list[int]) -> None:
        """Put the state after the prompts back, into any columns of the requests' slots.

        Args:
            requests: Some of ``self.requests``.
            columns: One for each, as if so many drafts of the last step had been accepted.
        """
        pairs = list(zip(requests, columns, strict=True))
        for group in self.recurrent:
            self._copy(
                group,
                [r.kept[group] for r in requests],
                [r.blocks[group][column] for r, column in pairs],
            )
            self._builder(group).record_states(
                self._index([r.blocks[group][0] for r in requests]),
                self._index([r.position - column for r, column in pairs]),
                self._index([column + 1 for column in columns]),
            )

    def step(
        self, requests: list[Request], case: Case, rejected: list[int], eager: bool
    ) -> Tensors:
        """One decode step and the drafts after it; nothing of it is kept.

        Args:
            requests: Whose.
            case: The width and the depth; its number of requests is not read.
            rejected: How many tokens of each are taken to be wrong.
            eager: Without graphs.

        Returns:
            Results and what was written to the caches. The metadata are in ``self.metadata``, the
            graphs that ran in ``self.replayed``.
        """
        with replays(self.runner) as self.replayed:
            return self._step(requests, case, rejected, eager)

    def _step(
        self, requests: list[Request], case: Case, rejected: list[int], eager: bool
    ) -> Tensors:
        runner, names = self.runner, [request.name for request in requests]
        cached = CachedRequestData.make_empty()
        cached.req_ids = names
        cached.num_computed_tokens = [request.position for request in requests]
        cached.num_output_tokens = [1] * len(names)
        cached.new_block_ids = [None] * len(names)
        output = SchedulerOutput.make_empty()
        output.num_spec_tokens_to_schedule = case.depth
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = dict.fromkeys(names, case.width)
        output.total_num_scheduled_tokens = case.width * len(names)
        if case.width > 1:
            drafts = [0] * (case.width - 1)
            output.scheduled_spec_decode_tokens = {name: list(drafts) for name in names}
        runner.execute_model(output, is_profile=eager)
        state, runner.execute_model_state = runner.execute_model_state, None
        self.metadata = state.attn_metadata
        hidden = state.hidden_states
        results = {
            Part(TARGET, "hidden states"): hidden[: state.input_batch.num_tokens].clone(),
            Part(TARGET, "KV cache"): self._keys_and_values(requests, [case.width] * len(names)),
            Part(TARGET, "recurrent state"): self._digests(requests, case.width),
        }
        if self.drafts:
            # The runner sorts a step's requests.
            wrong = dict(zip(names, rejected, strict=True))
            in_order = [wrong[name] for name in state.input_batch.req_ids]
            results |= self._draft(state, case, in_order, eager)
            # What a rejected token leaves is never read.
            kept = [case.width - count + max(case.depth, 1) - 1 for count in rejected]
            results[Part(DRAFTER, "KV cache")] = self._keys_and_values(requests, kept, draft=True)
        return results

    def _draft(self, state: Any, case: Case, rejected: list[int], eager: bool) -> Tensors:
        runner = self.runner
        drafter, batch = runner.speculator, state.input_batch
        wrong = self._index(rejected).int()
        sampling = runner.sampler.sampling_states
        # vLLM's own: a drafter that skips steps keeps a record of those that it is asked for.
        TargetDependentARSpeculator.propose(
            drafter,
            input_batch=batch,
            attn_metadata=state.attn_metadata,
            slot_mappings=state.slot_mappings_by_layer,
            last_hidden_states=get_drafter_hidden_states(runner.model, state.hidden_states),
            aux_hidden_states=None,
            num_sampled=case.width - wrong,
            num_rejected=wrong,
            last_sampled=runner.req_states.last_sampled_tokens,
            next_prefill_tokens=runner.req_states.next_prefill_tokens,
            temperature=sampling.temperature.gpu,
            seeds=sampling.seeds.gpu,
            is_profile=eager,
            num_speculative_tokens=case.depth,
        )
        made = drafter.draft_tokens[: batch.num_reqs, : case.depth]
        return {
            Part(DRAFTER, "drafts"): made.clone(),
            Part(DRAFTER, "hidden states"): drafter.hidden_states[: batch.num_reqs].clone(),
        }

    def randomise(self, seed: int) -> None:
        """Other sampled and draft tokens in every request."""
        states = self.runner.req_states
        draw = torch.Generator().manual_seed(seed)
        for tokens in (states.last_sampled_tokens, states.draft_tokens):
            if tokens.numel():
                new = torch.randint(self.runner.vocab_size, tokens.shape, generator=draw)
                tokens.copy_(new.to(tokens.dtype))

    def _keys_and_values(
        self, requests: list[Request], tokens: list[int], draft: bool = False
    ) -> torch.Tensor:
        """[rows, layers, heads, values]: what the caches hold at the next so many positions."""
        layers = []
        groups = self.runner.kv_cache_config.kv_cache_groups
        for number, group in enumerate(groups):
            names = [n for n in group.layer_names if (n in self.drafting) == draft]
            if number in self.recurrent or not names:
                continue
            size = group.kv_cache_spec.block_size
            slots = [
                request.blocks[number][at // size] * size + at % size
                for request, count in zip(requests, tokens, strict=True)
                for at in range(request.position, request.position + count)
            ]
            # Blocks of the kernel, of which the scheduler's has several.
            block = self.layers[names[0]].kv_cache.shape[2]
            at = self._index([slot // block for slot in slots])
            row = self._index([slot % block for slot in slots])
            layers += [self.layers[name].kv_cache[at, :, row] for name in names]
        return torch.stack(layers, 1) if layers else torch.zeros(0)

    def _digests(self, requests: list[Request], width: int) -> torch.Tensor:
        """[requests * columns, ...] int64: sums over the bits of the states that a step leaves."""
        sums = []
        for group in self.recurrent:
            parts = self._parts([slot for r in requests for slot in r.blocks[group][:width]])
            for cache in self._states(group):
                sums.append(torch.cat([_digest(cache[part]) for part in parts]))
        return torch.cat(sums, 1) if sums else torch.zeros(0)

    def close(self) -> None:
        """Finish all requests and leave their blocks as they were: 0, and no state recorded."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {request.name for request in self.requests}
        self.runner.execute_model(output)
        for number, group in enumerate(self.runner.kv_cache_config.kv_cache_groups):
            held = [block for request in self.requests for block in request.blocks[number]]
            if number in self.recurrent:
                held += [request.kept[number] for request in self.requests]
                caches = list(self._states(number))
                first = self._index([request.blocks[number][0] for request in self.requests])
                none = torch.zeros_like(first)
                self._builder(number).record_states(first, none, none)
            else:
                caches = [self.layers[name].kv_cache for name in group.layer_names]
                inner = group.kv_cache_spec.block_size // caches[0].shape[2]
                held = [block * inner + i for block in held for i in range(inner)]
            for part in self._parts(held):
                for cache in caches:
                    cache[part] = 0


def _digest(states: torch.Tensor) -> torch.Tensor:
    """[blocks, states.shape[1]] int64: one changed bit changes it, and so do two rows that change
    places."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    bits = states.contiguous().view(kinds[states.element_size()])
    rows = bits.view(*bits.shape[:2], -1, bits.shape[-1]).sum(-1, dtype=torch.int64)
    weights = torch.arange(1, rows.shape[-1] + 1, device=rows.device)
    return (rows * weights).sum(-1)


class StepRun:
    """A ``CapturedRun`` over ``Steps``."""

    def __init__(self, steps: Steps, case: Case) -> None:
        self.steps, self.case = steps, case
        self.requests: list[Request] = []
        self.seen = 0
        self.replayed: set[tuple[int, Any]] = set()

    @property
    def name(self) -> str:
        """As in ``CapturedRun``."""
        c = self.case
        drafts = f", then {c.depth} drafts each" if c.depth else ""
        return f"{c.requests} requests of {c.width} tokens (depth {c.width - 1}{drafts})"

    def prepare(self, seed: int) -> bool:
        """As in ``CapturedRun``. An odd seed leaves a request out, where the graph is the same."""
        case, steps = self.case, self.steps
        wanted = case.requests - seed % 2
        count = min(wanted, len(steps.requests))
        if count < 1 or (count < case.requests and not self._same_graphs(count)):
            return False
        draw = random.Random(f"{seed} {case}")
        self.requests = steps.others(count)
        self.columns = [draw.randint(0, steps.depth) for _ in range(count)]
        self.rejected = [draw.randrange(case.width) for _ in range(count)]
        self.seed = draw.randrange(2**31)
        self.seen += 1
        return True

    def _same_graphs(self, count: int) -> bool:
        """Whether so many requests run from the graphs of the case."""
        width = self.case.width

        def graph(requests: int) -> Any:
            return self.steps.runner.cudagraph_manager.dispatch(
                requests, requests * width, width, 0
            )

        found = graph(count)
        return found == graph(self.case.requests) and found.num_reqs != count

    def graphs(self) -> set[tuple[int, Any]]:
        """The captured graphs that a step of the case runs from, as ``replays`` has them."""
        case = self.case
        first, further = (case.requests, case.width), (case.requests, case.depth)
        target, prefill, decode = captured(self.steps.runner)
        found = {
            (number, key)
            for number, keys in enumerate((target, prefill))
            for key in keys
            if (key.num_reqs, key.uniform_token_count, key.num_active_loras) == (*first, 0)
        }
        # With one draft there are no further passes.
        return found | {
            (2, key)
            for key in decode
            if case.depth > 1 and key.num_active_loras == 0
            if (key.num_reqs, getattr(key, "num_speculative_tokens", case.depth)) == further
        }

    def replay(self) -> Tensors:
        """As in ``CapturedRun``.

        Raises:
            GraphError: There is a graph for the step, and it did not run from it.
        """
        results = self._step(eager=False)
        self.replayed |= self.steps.replayed
        missing = self.graphs() - self.steps.replayed
        if len(self.requests) < self.case.requests:
            # The drafter's further passes may have a smaller graph for so many.
            missing = {(number, key) for number, key in missing if number < 2}
        if missing:
            whose = TARGET if min(number for number, _ in missing) == 0 else DRAFTER
            raise GraphError(
                f"the {whose} has a graph for {self.name}, but vLLM ran that step without it: set "
                f"VLLM_B70_GRAPHS={INSTEAD[whose]}, and report this as a bug of vllm_b70."
            )
        return results

    def eager(self) -> Tensors:
        """As in ``CapturedRun``.

        Raises:
            GraphError: The step ran from a graph.
        """
        results = self._step(eager=True)
        if self.steps.replayed:
            raise GraphError(
                f"vLLM ran a step of {self.name} from a graph that was to be compared with it: set "
                "VLLM_B70_GRAPHS=off, and report this as a bug of vllm_b70."
            )
        return results

    def _step(self, eager: bool) -> Tensors:
        self.steps.randomise(self.seed)
        self.steps.restore(self.requests, self.columns)
        return self.steps.step(self.requests, self.case, self.rejected, eager)

    def buffers(self) -> Tensors:
        """As in ``CapturedRun``: the tensors of the step's metadata."""
        distinct = {id(m): m for m in self.steps.metadata.values()}
        return {
            Part(TARGET, f"{type(m).__name__}.{field.name}"): value
            for m in distinct.values()
            if dataclasses.is_dataclass(m)
            for field in dataclasses.fields(m)
            if isinstance(value := getattr(m, field.name), torch.Tensor)
        }
