"""vLLM's workers with a drafter that may skip steps. Official seam: ``parallel_config.worker_cls``.

The runner has made its drafter by then; ours takes its place, a subclass of the class it has.
"""

from __future__ import annotations

from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname

STOCK = {
    "CpuWorker": "vllm.v1.worker.cpu_worker.CPUWorker",
    "GpuWorker": "vllm.v1.worker.gpu_worker.Worker",
}


def skipping_proposer(runner: Any) -> Any:
    """What is to be the drafter of a V1 ``runner``."""
    from vllm_b70.speculation.proposer import SkippingProposer

    base = type(runner.drafter)
    cls = type(f"Skipping{base.__name__}", (SkippingProposer, base), {})
    return cls(runner.vllm_config, runner.device, runner)


def skipping_speculator(runner: Any) -> Any:
    """What is to be the speculator of a V2 ``runner``."""
    from vllm_b70.speculation.speculator import SkippingSpeculator

    base = type(runner.speculator)
    cls = type(f"Skipping{base.__name__}", (SkippingSpeculator, base), {})
    return cls(runner.vllm_config, runner.device)


class _CpuMixin:
    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        runner = self.model_runner  # type: ignore[attr-defined]
        runner.drafter = skipping_proposer(runner)


class _GpuMixin:
    def _make_model_runner(self) -> Any:
        runner = super()._make_model_runner()  # type: ignore[misc]
        runner.speculator = skipping_speculator(runner)
        return runner


def __getattr__(name: str) -> type:
    """``CpuWorker`` and ``GpuWorker``, made when vLLM asks: each imports its device's worker."""
    if name not in STOCK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    mixin = _CpuMixin if name == "CpuWorker" else _GpuMixin
    made = type(name, (mixin, resolve_obj_by_qualname(STOCK[name])), {"__module__": __name__})
    globals()[name] = made
    return made
