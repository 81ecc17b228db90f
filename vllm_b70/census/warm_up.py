"""Launches every kernel that a server may need once, before it serves.

Triton compiles a kernel, or loads it from its cache on disk, at its first launch. vLLM's profiling
run has the largest step, its warm-up a few small ones, and its graphs pure decodes of the sizes
that are captured: the tiles of prompts between, those of the lm_head, which no graph holds, the
norms of so many rows, and attention of mixed steps would be compiled while requests wait. A census
launches them, but not where its certificate is found, and it does not look at drafting.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from vllm_b70.census import memory
from vllm_b70.census.path import distinct, find, find_of_draft
from vllm_b70.census.rows import RowProbe
from vllm_b70.census.steps import TAIL, Request, StepProbe
from vllm_b70.census.verdict import SEEDS
from vllm_b70.ops.attention import sequence_counts

logger = logging.getLogger("vllm.vllm_b70")


@torch.inference_mode()
def warm_up(model: Any, draft: Any, config: VllmConfig, device: torch.device) -> None:
    """Launch what two models may launch, and log how long it took.

    Args:
        model: The target model, loaded.
        draft: The draft model, or None.
        config: The server's.
        device: Where they are.
    """
    begun = time.perf_counter()
    allowed = memory.of_device(device)
    calls = ops = 0
    with set_current_vllm_config(config), torch.compiler.set_stance("force_eager"):
        probes = find([model], config, device, allowed)
        if draft is not None:
            probes = distinct([*probes, *find_of_draft(draft, config, device, allowed)])
        for probe in probes:
            try:
                if probe.least_memory > allowed:
                    raise ValueError("too little memory is left beside the weights")
                made = launch(probe, config.scheduler_config.max_num_seqs)
                calls, ops = calls + made, ops + (made > 0)
            except Exception as error:
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                logger.warning(
                    "vllm_b70: %s %s is not warmed up, so that its kernels are compiled while "
                    "requests wait: %s", probe.op, probe.shape, text,
                )  # fmt: skip
        torch.accelerator.synchronize()
    memory.release(device)
    logger.info(
        "vllm_b70: warm-up: %d launches of %d ops and shapes, %.1f s",
        calls, ops, time.perf_counter() - begun,
    )  # fmt: skip


def launch(probe: Any, sequences: int) -> int:
    """Make a probe's launches, with at most so many sequences in a step; how many there were."""
    if isinstance(probe, RowProbe):
        return launch_rows(probe)
    return launch_steps(probe, sequences) if isinstance(probe, StepProbe) else 0


def launch_rows(probe: RowProbe) -> int:
    """Call an op at each of its ``launches`` that there is memory for; how often."""
    counts = sorted({min(rows, probe.most_rows) for rows in probe.launches})
    for rows in counts:
        probe.run(*probe.inputs(rows, SEEDS[0]))
    return len(counts)


def launch_steps(probe: StepProbe, most: int) -> int:
    """Make a step of each kind among each number of sequences that has a kernel of its own: few
    prompt rows alone, many alone or beside others, decodes, and verifications.

    Args:
        probe: The op.
        most: The most sequences of a step. Those that pad a graph count as such.

    Returns:
        How many steps were made.
    """
    streams = [probe.inputs(prompt + TAIL, SEEDS[0]) for prompt in probe.prompts]
    requests, longest = min(2, probe.requests), len(streams) - 1
    steps = 0
    for sequences in sequence_counts(most):
        few, many = Request(0, 0, probe.prompts), Request(1, longest, probe.prompts)
        made = [([few.chunk(few.prompt)], 0)]
        if sequences == 1 or requests == 1:
            few = Request(0, longest, probe.prompts)  # another one in the slot
            made.append(([few.chunk(few.prompt)], 0))
        else:
            made.append(([few.verify(1), many.chunk(many.prompt)], sequences - 2))
        for width in sorted({1, probe.depth + 1}):
            made.append(([few.verify(width, width - 1)], sequences - 1))
        with probe.session(requests, streams) as session:
            for pieces, padding in made:
                session.step(pieces, padding)
        steps += len(made)
    return steps
