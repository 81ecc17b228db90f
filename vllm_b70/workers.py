"""vLLM's workers with what the route adds to them.

Official seam: ``parallel_config.worker_cls``, which the platform sets to the name here of a class
over the one that vLLM picked: with a census once the weights are loaded, and on a GPU a warm-up
(``census.worker``), with verified graphs (``graphs.worker``), with a drafter that may skip steps
(``speculation.workers``), or with several of these.
"""

from __future__ import annotations

import functools
from typing import Any

#: vLLM's workers, by the name of their device here.
STOCK = {
    "Cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
    "Gpu": "vllm.v1.worker.gpu_worker.Worker",
    "Xpu": "vllm.v1.worker.xpu_worker.XPUWorker",
}
CENSUS, GRAPHS, SKIPPING = "Census", "Graphs", "Skipping"
_NAMES = {
    f"{census}{graphs}{skipping}{device}Worker": (census, graphs, skipping, device)
    for census in ("", CENSUS)
    for graphs in ("", GRAPHS)
    for skipping in ("", SKIPPING)
    for device in STOCK
    if (census or graphs or skipping) and not (graphs and device == "Cpu")
}


def over(
    worker: str, *, census: bool = False, graphs: bool = False, skipping: bool = False
) -> str | None:
    """The qualified name of our class over a worker, which has at least what is asked for.

    Args:
        worker: Qualified name of one of vLLM's workers, or of one of ours.
        census: Take a census, if the switch says so, and warm up.
        graphs: Guard and verify captured graphs; no worker on a CPU has any.
        skipping: With a drafter that may skip steps.

    Returns:
        The name; ``worker`` itself if nothing is asked for; None if there is no class over it.
    """
    stock = {name: ("", "", "", device) for device, name in STOCK.items()}
    ours = {f"{__name__}.{name}": parts for name, parts in _NAMES.items()}
    if worker not in stock | ours:
        return None
    had_census, had_graphs, had_skipping, device = (stock | ours)[worker]
    name = CENSUS if census else had_census
    name += GRAPHS if graphs else had_graphs
    name += SKIPPING if skipping else had_skipping
    return f"{__name__}.{name}{device}Worker" if name else worker


@functools.cache
def _worker(name: str) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    census, graphs, skipping, device = _NAMES[name]
    bases: list[Any] = []
    if census:
        from vllm_b70.census.worker import CensusMixin

        bases.append(CensusMixin)
    if graphs:
        from vllm_b70.graphs.worker import GraphsMixin

        bases.append(GraphsMixin)
    if skipping:
        from vllm_b70.speculation import workers

        bases.append(workers.CpuMixin if device == "Cpu" else workers.GpuMixin)
    members = {"__module__": __name__, "__doc__": f"vLLM's {device} worker and more."}
    return type(name, (*bases, resolve_obj_by_qualname(STOCK[device])), members)


def __getattr__(name: str) -> type:
    """Our worker classes by name, made when vLLM asks: each needs a vLLM built for its device."""
    if name in _NAMES:
        return _worker(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
