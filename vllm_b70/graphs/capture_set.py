"""Which graphs there are: one set for each scheduled depth, keyed by requests and their tokens.

vLLM 0.32 keys a graph of a decode by its tokens, its requests and the tokens of each, so that the
graph of 8 requests of 4 tokens never serves 16 of 2. But for each number of tokens it lists only
the graphs of the next captured number, which need not have one of the width that runs: with widths
4 and 2 and the sizes 8 and 10, six requests of 2 tokens find the graph of 3 requests of 4, and run
without one though there may be a larger one of their width. ``complete`` lists that one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from vllm_b70.compat.seams import require
from vllm_b70.graphs.verify import GraphError

require("graph_manager", "graph_key", "graph_fits")


def managers(runner: Any) -> list[Any]:
    """The managers of a runner's graphs: of the target, and of the drafter's first pass and its
    further ones; None for what it has not."""
    names = ("prefill_cudagraph_manager", "decode_cudagraph_manager")
    return [runner.cudagraph_manager, *(getattr(runner.speculator, n, None) for n in names)]


def complete(manager: Any) -> None:
    """Let a step run from the smallest graph of its width that holds it.

    Args:
        manager: A ``CudaGraphManager``; its list of candidates by tokens and adapters is replaced.
    """
    graphs = sorted(planned(manager), key=lambda graph: graph.num_tokens)
    candidates: dict[tuple[int, int], list[Any]] = {}
    for tokens, adapters in manager._candidates:
        fitting: dict[int | None, Any] = {}
        for graph in graphs:
            if graph.num_tokens >= tokens and graph.num_active_loras == adapters:
                fitting.setdefault(graph.uniform_token_count, graph)
        candidates[tokens, adapters] = list(fitting.values())
    manager._candidates = candidates


def keep(manager: Any, wanted: Callable[[Any], bool]) -> None:
    """Let steps run from some of a manager's graphs only, all others without one.

    Args:
        manager: A ``CudaGraphManager``; its list of candidates is replaced.
        wanted: Says it of a graph's key.
    """
    candidates = manager._candidates.items()
    manager._candidates = {at: [key for key in keys if wanted(key)] for at, keys in candidates}


def planned(manager: Any) -> list[Any]:
    """The keys of the graphs that a manager captures, in the order in which it does."""
    return [graph for graphs in manager._capture_descs.values() for graph in graphs]


def sizes_that_fit(sizes: Sequence[int], keys: Iterable[Any], captured: int) -> list[int]:
    """The capture sizes to ask for where memory ended after some graphs.

    vLLM captures from the largest on, and a smaller graph takes no more than a larger one, so as
    many of the smallest fit.

    Args:
        sizes: Capture sizes as configured.
        keys: The keys of all graphs.
        captured: How many there was room for.
    """
    smallest = sorted(keys, key=lambda key: key.num_tokens)
    lost = [(key.num_tokens, key.uniform_token_count or 1) for key in smallest[captured:]]
    return [
        size
        for size in sorted(sizes)
        if all(-(-size // width) * width != tokens for tokens, width in lost)
    ]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device has no room; an XPU's driver has names of its own."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and any(f"OUT_OF_{what}" in str(error) for what in ("RESOURCES", "DEVICE_MEMORY"))
    )


def out_of_memory(sizes: Sequence[int], manager: Any, error: BaseException) -> GraphError:
    """The sentence for a device that ran out of memory while vLLM captured.

    Args:
        sizes: Capture sizes as configured.
        manager: The target's ``CudaGraphManager``, with the graphs that it has captured.
        error: What was raised; its first line is quoted.
    """
    keys, captured = planned(manager), len(manager.graphs)
    fit = sizes_that_fit(sizes, keys, captured)
    if captured == len(keys):
        advice = "all of the target's fit: set VLLM_B70_GRAPHS=target"
    elif fit:
        advice = f"these sizes fit: use --cudagraph-capture-sizes {' '.join(map(str, fit))}"
    else:
        advice = f"no size fits: use --max-cudagraph-capture-size below {max(sizes)}"
    said = str(error).strip().splitlines()
    return GraphError(
        f"there is no room on the device for all graphs ({captured} of the target's {len(keys)} "
        f"were captured; {said[0] if said else type(error).__name__}); {advice}, or lower "
        "--gpu-memory-utilization."
    )
