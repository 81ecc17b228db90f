"""Patch: the V2 model runner tells prompt chunks from other rows by position.

what      GPUModelRunner.gather_batch_req_state
why       vLLM 0.32 runs a prompt chunk of one token as a decode, and takes output that a resumed
          request computes again for prompt: both pick the arithmetic by the cut, not by position
upstream  not reported yet
versions  0.32
remove    when vLLM tells both from the prompt's length; tests/compat fails then
"""

from __future__ import annotations

from typing import Any

from vllm_b70.compat.seams import require

_applied = False


def by_position(state: Any, prompt_lens: Any) -> Any:
    """The runner's batch with rows past their prompt, and only those, running as decodes.

    Args:
        state: A ``BatchReqState``.
        prompt_lens: [requests] int array, the requests' prompt lengths in batch order.
    """
    replayed = state.is_prefilling_np & (state.num_computed_prefill_tokens_np >= prompt_lens)
    return state._replace(prefill_runs_as_decode_np=replayed, decode_graph_eligible=False)


def apply() -> None:
    """Wrap the runner's method; safe to call again."""
    global _applied
    if _applied:
        return
    require("runner_batch", "runner_batch_state", "runner_prompt_length")
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    original = GPUModelRunner.gather_batch_req_state

    def gather_batch_req_state(self: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        state, uniform_tokens = original(self, scheduler_output, dummy_run)
        if state is None or not state.has_prefill:
            return state, uniform_tokens
        prompt_lens = self.req_states.prompt_len.np[state.idx_mapping_np]
        # A step with prompt or replayed rows never runs from a decode graph.
        return by_position(state, prompt_lens), None

    GPUModelRunner.gather_batch_req_state = gather_batch_req_state  # type: ignore[method-assign]
    _applied = True
