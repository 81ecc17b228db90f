"""vLLM's two schedulers with prompt chunks on the grid.

Official seam: ``scheduler_config.scheduler_cls``. The mixin works through the hook that vLLM calls
for models with recurrent state, ``_mamba_block_aligned_split``, without vLLM's "align" cache mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_b70.chunk_grid import chunk_tokens
from vllm_b70.compat.seams import require
from vllm_b70.scheduling.step_trace import Step, StepTrace
from vllm_b70.settings import current

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

require("chunk_split", "chunk_split_flag", "schedule", "encoder_inputs")


class ChunkGridMixin:
    """Ends prompt chunks on the grid and, if asked to, records each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True
        path = current().step_trace
        self._trace = StepTrace(path) if path is not None else None
        self._cuts = 0

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
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        if self._trace is not None and output.num_scheduled_tokens:
            self._trace.write(self._step(output))
        self._cuts = 0
        return output

    def _step(self, output: SchedulerOutput) -> Step:
        step = Step(
            requests=len(output.num_scheduled_tokens),
            preempted=len(output.preempted_req_ids or ()),
            cuts=self._cuts,
        )
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]  # type: ignore[attr-defined]
            # vLLM has already advanced num_computed_tokens past this step's tokens.
            if request.num_computed_tokens - tokens < request.num_prompt_tokens:
                step.prompt_tokens += tokens
            else:
                step.widths[tokens] += 1
        return step


class ChunkGridScheduler(ChunkGridMixin, Scheduler):
    """The synchronous scheduler on the chunk grid."""


class AsyncChunkGridScheduler(ChunkGridMixin, AsyncScheduler):
    """The asynchronous scheduler on the chunk grid."""
