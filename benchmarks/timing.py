"""Timing by CUDA-graph replay, with weights rotated past the last-level cache."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_b70.compat.versions import version_of

#: Bytes between two uses of one weight: more than twice the L2 of an H200.
ROTATION = 160 * 2**20


def copies(weight_bytes: int) -> int:
    """How many copies of a weight to rotate, at most 24."""
    return max(2, min(24, -(-ROTATION // weight_bytes)))


def graph_us(calls: Sequence[Callable[[], Any]], replays: int = 15, least: int = 12) -> float:
    """Median microseconds of one call, over replays of a graph that holds all calls in turn.

    Args:
        calls: The same work on different weights.
        replays: Replays that are timed, after three that are not.
        least: Calls in the graph at least.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    repeat = max(1, least // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (repeat * len(calls)))
    return statistics.median(times)


def in_turn_us(*sides: Sequence[Callable[[], Any]], turns: int = 5, least: int = 12) -> list[float]:
    """``graph_us`` of each of several sides, median over turns that go round among them: what is to
    be compared drifts together, by some percent for a kernel of microseconds.

    Args:
        sides: The calls of each.
        turns: How often each is timed.
        least: As for ``graph_us``.
    """
    timed = [[graph_us(calls, least=least) for calls in sides] for _ in range(turns)]
    return [statistics.median(us) for us in zip(*timed, strict=True)]


def copy_gb_per_s() -> float:
    """Bytes read and written per second by a copy of 2 GiB, in 1e9.

    The copy is a kernel: a copy by the driver, which ``copy_`` is, was slower by a third.
    """
    source = torch.zeros(2**30, dtype=torch.float16, device="cuda")
    target = torch.empty_like(source)
    us = graph_us([lambda: torch.neg(source, out=target)], least=3)
    return 2 * source.numel() * source.element_size() / us / 1e3


def head() -> dict[str, Any]:
    """What every kept result begins with: device, versions and command, without paths."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    script, *arguments = sys.argv
    script = f"benchmarks/{Path(script).name}"
    words = ["python", script, *(Path(a).name if "/" in a else a for a in arguments)]
    return {"device": name, "versions": versions(), "command": " ".join(words)}


def versions() -> dict[str, str]:
    """Versions of what can change a figure."""
    found = {"torch": torch.__version__}
    for name in ("triton", "vllm", "humming-kernels", "conch-triton-kernels"):
        if installed := version_of(name):
            found[name] = installed
    return found
