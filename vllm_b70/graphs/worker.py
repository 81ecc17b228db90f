"""A worker whose graphs are captured without waiting for the device, and verified before it serves.

The runner's entry ``capture_model`` is called twice a start: to learn how much memory graphs take,
and to capture them. Both are guarded; what the second captured is verified.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_b70.compat.seams import require
from vllm_b70.settings import current

require("capture_model", "drafter_graphs")

# A child of vLLM's logger, so that the user's logging configuration applies.
logger = logging.getLogger("vllm.vllm_b70")


class GraphsMixin:
    """Mixin over vLLM's GPU and XPU workers."""

    def _make_model_runner(self) -> Any:
        runner = super()._make_model_runner()  # type: ignore[misc]
        if current().graphs == "target" and runner.speculator is not None:
            leave_eager(runner.speculator)
        capture = runner.capture_model
        runner.capture_model = functools.partial(capture_and_verify, runner, capture)
        return runner


def leave_eager(drafter: Any) -> None:
    """Let a speculator capture nothing: it makes its managers for no graphs."""
    original = drafter.init_cudagraph_manager
    drafter.init_cudagraph_manager = lambda mode: original(CUDAGraphMode.NONE)


def managers(runner: Any) -> list[Any]:
    """The runner's managers of graphs, the target's first."""
    names = ("prefill_cudagraph_manager", "decode_cudagraph_manager")
    drafter = [getattr(runner.speculator, name, None) for name in names]
    return [manager for manager in (runner.cudagraph_manager, *drafter) if manager is not None]


@torch.inference_mode()
def capture_and_verify(runner: Any, capture: Any, *, profile_only: bool = False) -> int:
    """The runner's ``capture_model``.

    Args:
        runner: vLLM's V2 runner.
        capture: Its own ``capture_model``.
        profile_only: vLLM is measuring; what it captures will be thrown away.

    Returns:
        Bytes that the graphs take.

    Raises:
        GraphError: One sentence: a region waits for the device, the device has no room, or a
            graph is not the eager step that it stands for.
    """
    from vllm_b70.graphs import capture_set, recording

    for manager in managers(runner):
        capture_set.complete(manager)
    sizes = runner.compilation_config.cudagraph_capture_sizes
    try:
        with recording.guarded(runner.device):
            taken: int = capture(profile_only=profile_only)
    except Exception as error:
        if not profile_only and capture_set.is_out_of_memory(error):
            raise capture_set.out_of_memory(sizes, runner.cudagraph_manager, error) from error
        raise
    if not profile_only:
        verify_runner(runner)
    return taken


def verify_runner(runner: Any) -> None:
    """Verify all graphs of a runner, and say how long it took.

    Raises:
        GraphError: A graph is not the eager step that it stands for.
    """
    from vllm_b70.graphs.steps import StepRun, Steps, captured, cases
    from vllm_b70.graphs.verify import enforce, verify

    begun = time.perf_counter()
    graphs = captured(runner)
    work = cases(*graphs, runner.num_speculative_steps)
    if not work:
        return
    steps = Steps(runner, max(case.requests for case in work))
    runs = [StepRun(steps, case) for case in work]
    found = verify(runs)
    steps.close()
    enforce(found)
    unseen = [run.name for run in runs if not run.seen]
    if unseen:
        logger.warning(
            "vllm_b70: the KV cache has no room for %d requests at a time, so the graphs for more "
            "are not verified, nor can they run: %s",
            len(steps.requests), ", ".join(unseen),
        )  # fmt: skip
    logger.info(
        "vllm_b70: graphs: %d of the target and %d of the drafter have the bits of eager steps, "
        "%d sizes and depths, %.1f s",
        len(graphs[0]), len(graphs[1]) + len(graphs[2]), len(runs) - len(unseen),
        time.perf_counter() - begun,
    )  # fmt: skip
