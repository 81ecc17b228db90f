"""vLLM's workers with a census between the loading of weights and everything that runs the model.

Official seam: ``parallel_config.worker_cls``, which the platform sets to the name here of the class
that vLLM picked.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_b70.compat.seams import require
from vllm_b70.settings import current

#: vLLM's worker classes and ours over them.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_b70.census.worker.CensusCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "vllm_b70.census.worker.CensusWorker",
    "vllm.v1.worker.xpu_worker.XPUWorker": "vllm_b70.census.worker.CensusXPUWorker",
}


class CensusMixin:
    """Mixin over a worker class of vLLM."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        mode = current().census
        if mode != "off":
            from vllm_b70.census.census import enforce

            enforce(self.take_census(), mode)

    def take_census(self, anew: bool = False) -> Any:
        """The certificate of the loaded model and its draft model; see ``census.take``."""
        from vllm_b70.census.census import take

        worker: Any = self
        models = [worker.get_model(), worker.get_draft_model()]
        models = [model for model in models if model is not None]
        return take(models, worker.vllm_config, worker.device, anew)


@functools.cache
def _worker(name: str) -> type:
    require("worker_load")
    base = next(stock for stock, ours in WORKERS.items() if ours.rpartition(".")[2] == name)
    members = {"__module__": __name__, "__qualname__": name, "__doc__": f"{base}, certified."}
    return type(name, (CensusMixin, resolve_obj_by_qualname(base)), members)


def __getattr__(name: str) -> type:
    """Our worker classes by name, made when vLLM asks: each needs a vLLM built for its device."""
    if name in {ours.rpartition(".")[2] for ours in WORKERS.values()}:
        return _worker(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
