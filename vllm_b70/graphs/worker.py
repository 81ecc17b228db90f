"""A worker whose graphs are captured without waiting for the device, and verified before it serves.

The runner's entry ``capture_model`` is called twice a start: to learn how much memory graphs take,
and to capture them. Both are guarded; what the second captured is verified.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
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
    from vllm_b70.graphs.verify import GraphError

    for manager in filter(None, capture_set.managers(runner)):
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
        try:
            verify_runner(runner)
        except Exception as error:
            if not capture_set.is_out_of_memory(error):
                raise
            raise GraphError(
                "there is no room on the device to verify its graphs beside the KV cache "
                f"({type(error).__name__}): lower --gpu-memory-utilization, or set "
                "VLLM_B70_GRAPHS=off."
            ) from error
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
    replayed = set().union(*(run.replayed for run in runs))
    left = [
        [key for key in keys if not key.num_active_loras and (number, key) not in replayed]
        for number, keys in enumerate(graphs)
    ]
    if any(left):
        unseen = [run for run in runs if run.graphs() - replayed]
        logger.warning(
            "vllm_b70: the KV cache has no room for %d requests with all their states, so some "
            "graphs cannot be verified and such steps run without one: %s",
            max((run.case.requests for run in unseen), default=0),
            ", ".join(run.name for run in unseen),
        )  # fmt: skip
        withhold(runner, left)
    target = sum(number == 0 for number, _ in replayed)
    logger.info(
        "vllm_b70: graphs: %d of the target and %d of the drafter have the bits of eager steps, "
        "%d sizes and depths, %.1f s",
        target, len(replayed) - target, sum(run.seen > 0 for run in runs),
        time.perf_counter() - begun,
    )  # fmt: skip


def withhold(runner: Any, unverified: list[list[Any]]) -> None:
    """Let no step run from graphs that nothing has verified.

    Args:
        runner: vLLM's.
        unverified: Keys of such graphs, as ``steps.captured`` has them.
    """
    from vllm_b70.graphs.capture_set import keep, managers

    def shape(key: Any) -> tuple[int, int, int]:
        # Steps find the drafter's further passes whatever their number of drafts.
        return key.num_reqs, key.uniform_token_count, key.num_active_loras

    def others(keys: list[Any]) -> Callable[[Any], bool]:
        lost = {shape(key) for key in keys}
        return lambda key: shape(key) not in lost

    for manager, keys in zip(managers(runner), unverified, strict=True):
        if keys:
            keep(manager, others(keys))
