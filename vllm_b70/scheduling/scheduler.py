"""vLLM's two schedulers with prompt chunks on the grid and state by the depth of the drafts.

Official seam: ``scheduler_config.scheduler_cls``. The mixin works through the hook that vLLM calls
for models with recurrent state, ``_mamba_block_aligned_split``, without vLLM's "align" cache mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_b70.chunk_grid import chunk_tokens
from vllm_b70.compat import state_blocks
from vllm_b70.compat.seams import require
from vllm_b70.scheduling.state_blocks import deepest_that_fits, reserved_depths
from vllm_b70.scheduling.step_trace import Step, StepTrace
from vllm_b70.settings import current
from vllm_b70.speculation.depth_counts import DepthCounts
from vllm_b70.speculation.draft_lag import DraftLag

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

require("chunk_split", "chunk_split_flag", "schedule", "encoder_inputs")
require("make_stats", "spec_decoding_stats", "scheduler_stats")


class ChunkGridMixin:
    """Ends prompt chunks on the grid, reserves state by depth and, if asked to, records each step.

    Under a schedule of depths (and first come, first served, so that who is before whom does not
    change) a request's state slots follow ``scheduling.state_blocks``.
    """

    if TYPE_CHECKING:  # what vLLM's class under the mixin has

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True
        path = current().step_trace
        self._trace = StepTrace(path) if path is not None else None
        self._cuts = 0
        self._counts, self._lag = DepthCounts(), DraftLag(self.num_spec_tokens)
        self._cut_to: int | None = None
        self._states: list[Any] = []
        self._reserved: list[int] = []
        self._placed = self._spare = 0
        if self.dynamic_sd_lookup and self.policy == SchedulingPolicy.FCFS:
            self._reserved = reserved_depths(self.dynamic_sd_lookup)
            self._states = state_blocks.apply(self.kv_cache_manager, self._depth_to_hold)

    def _depth_to_hold(self, request: Request, tokens: int) -> tuple[int, int]:
        """Drafts to reserve state for, and those without which the step cannot be computed."""
        self._placed = min(self._placed + 1, len(self._reserved) - 1)
        needed = 0
        if request.num_computed_tokens >= request.num_prompt_tokens:
            # Rows past the prompt leave a state each: drafts, or a replay, which keeps its last.
            needed = min(tokens - 1, self.num_spec_tokens)
        wanted = max(needed, self._reserved[self._placed])
        held = len(self._states[0].req_to_blocks.get(request.request_id, ())) - 1
        extra = len(self._states) * (wanted - max(needed, held))
        if extra > 0:
            if extra > self._spare:
                return needed, needed
            self._spare -= extra
        return wanted, needed

    def _fit_drafts(self) -> None:
        """Shorten this step's drafts to what there are blocks for, and see what is to spare."""
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        self._placed, self._cut_to = 0, None
        # With room for the worst, which is the rule, nothing is counted.
        self._spare = free - self._most_blocks_needed()
        if self._spare >= 0:
            return
        most = max((len(request.spec_token_ids) for request in self.running), default=0)
        needs = [self._blocks_needed(depth) for depth in range(most + 1)]
        depth = deepest_that_fits(needs, free)
        self._cut_to = depth if depth < most else None
        for request in self.running:
            if len(request.spec_token_ids) > depth:
                request.spec_token_ids = request.spec_token_ids[:depth]
        self._spare = free - needs[depth]

    def _most_blocks_needed(self) -> int:
        """No fewer blocks than the running requests may need in a step, however deep."""
        sizes = [m.block_size for m in self.kv_cache_manager.coordinator.single_type_managers]
        states, others = len(self._states), len(sizes) - len(self._states)
        each = states * (1 + self.num_spec_tokens) + 2 * others
        return len(self.running) * each + others * -(-self.max_num_scheduled_tokens // min(sizes))

    def _blocks_needed(self, depth: int) -> int:
        """Blocks that the running requests need besides theirs to verify ``depth`` drafts each."""
        blocks = 0
        for request in self.running:
            computed = request.num_computed_tokens
            rows = request.num_tokens + request.num_output_placeholders - computed
            rows += min(len(request.spec_token_ids), depth)
            rows = min(rows, self.max_num_scheduled_tokens)
            past_prompt = computed >= request.num_prompt_tokens
            states = 1 + (min(rows - 1, self.num_spec_tokens) if past_prompt else 0)
            tokens = min(computed + rows + self.num_lookahead_tokens, self.max_model_len)
            for manager in self.kv_cache_manager.coordinator.single_type_managers:
                held = len(manager.req_to_blocks.get(request.request_id, ()))
                in_state = manager in self._states
                needed = states if in_state else -(-tokens // manager.block_size)
                blocks += max(0, needed - held)
        return blocks

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        start = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        )
        tokens = chunk_tokens(start, num_new_tokens, request.num_prompt_tokens)
        self._cuts += tokens < num_new_tokens
        return tokens

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        inputs, tokens, *rest = super()._try_schedule_encoder_inputs(  # type: ignore[misc]
            request,
            num_computed_tokens,
            num_new_tokens,
            encoder_compute_budget,
            shift_computed_tokens,
        )
        # vLLM ends a chunk before an image that does not fit this step, which is off the grid.
        tokens = chunk_tokens(num_computed_tokens, tokens, request.num_prompt_tokens)
        return inputs, tokens, *rest

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._states:
            self._fit_drafts()
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        if output.num_scheduled_tokens:
            if self.num_spec_tokens:
                self._count_depth(output)
            if self._trace is not None:
                self._trace.write(self._step(output))
        self._cuts = 0
        return output

    def _in_prompt(self, request_id: str, tokens: int) -> bool:
        """Whether a request's step began in its prompt."""
        request = self.requests[request_id]
        # vLLM has already advanced num_computed_tokens past this step's tokens.
        return bool(request.num_computed_tokens - tokens < request.num_prompt_tokens)

    def _count_depth(self, output: SchedulerOutput) -> None:
        """Count the step's depth, and what the drafter, by the same rule, does in it."""
        widths, depth = output.num_scheduled_tokens, output.num_spec_tokens_to_schedule
        if self._cut_to is not None:
            self._counts.add("draft_depth_steps", self._cut_to, "blocks")
        why = "fixed" if self.dynamic_sd_lookup is None else "schedule"
        self._counts.add("draft_depth_steps", depth, why)
        for gone in output.finished_req_ids:
            self._lag.forget(gone)
        inside = [self._in_prompt(*item) for item in widths.items()]
        step = self._lag.step(list(widths), list(widths.values()), inside, depth)
        if step.skip:
            self._counts.add("draft_layer_skipped_steps")
        elif any(step.replay):
            self._counts.add("draft_layer_caught_up_steps")

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        if num_draft_tokens:
            self._counts.add("drafts", num_draft_tokens)
            for position in range(num_accepted_tokens):
                self._counts.add("accepted_draft_tokens", num_draft_tokens, position)
        return super().make_spec_decoding_stats(  # type: ignore[misc]
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            self._counts.send(stats.num_kv_fetch_reqs_by_stage)
        return stats

    def _step(self, output: SchedulerOutput) -> Step:
        step = Step(
            requests=len(output.num_scheduled_tokens),
            preempted=len(output.preempted_req_ids or ()),
            cuts=self._cuts,
        )
        for request_id, tokens in output.num_scheduled_tokens.items():
            if self._in_prompt(request_id, tokens):
                step.prompt_tokens += tokens
            else:
                step.widths[tokens] += 1
        return step


class ChunkGridScheduler(ChunkGridMixin, Scheduler):
    """The synchronous scheduler on the chunk grid."""


class AsyncChunkGridScheduler(ChunkGridMixin, AsyncScheduler):
    """The asynchronous scheduler on the chunk grid."""
