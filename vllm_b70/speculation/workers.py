"""Mixins that give a worker a drafter that may skip steps.

The runner has made its drafter by then; ours takes its place, a subclass of the class it has.
"""

from __future__ import annotations

from typing import Any


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


class CpuMixin:
    """Mixin over vLLM's CPU worker."""

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        runner = self.model_runner  # type: ignore[attr-defined]
        runner.drafter = skipping_proposer(runner)


class GpuMixin:
    """Mixin over vLLM's GPU and XPU workers."""

    def _make_model_runner(self) -> Any:
        runner = super()._make_model_runner()  # type: ignore[misc]
        runner.speculator = skipping_speculator(runner)
        return runner
