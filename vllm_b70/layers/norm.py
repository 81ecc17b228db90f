"""The norms over ``ops.norm``, in eager, compiled and captured mode alike.

Official seam: out-of-tree classes of vLLM's norms. On the CPU only the gated norm is ours: vLLM's
other norms reduce each row by itself there. On a GPU none of vLLM's is row-invariant: its CUDA
kernels choose their block, its compiled graphs and the gated norm their rows a program, by the
number of rows. ``rms_norm_batch_invariant`` is not kept either: with a residual it is that CUDA
kernel again, and its sums follow the layout that the compiler picks for a pointer's alignment.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, RMSNormGated

from vllm_b70.compat.seams import require
from vllm_b70.ops import norm  # noqa: F401  (defines the ops)

require("gated_norm", "rms_norm", "gemma_norm")

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    offset: float,
) -> Normed:
    if residual is None:
        y: torch.Tensor = torch.ops.vllm_b70.rms_norm(x, weight, epsilon, offset)
        return y
    out, total = torch.ops.vllm_b70.add_rms_norm(x, residual, weight, epsilon, offset)
    return out, total


class _EveryDevice:
    """vLLM calls ``forward_native`` in compiled mode and the device's method in eager mode."""

    forward_native: Any

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    forward_cuda = forward_xpu = forward_cpu


class RowInvariantRMSNorm(_EveryDevice, RMSNorm):
    """RMS norm whose row depends on that row alone."""

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        if self.variance_size_override is not None:
            raise NotImplementedError("a norm over part of the row is not covered")
        weight = self.weight.data if self.has_weight else None
        return _norm(x, residual, weight, self.variance_epsilon, 0.0)


class RowInvariantGemmaRMSNorm(_EveryDevice, GemmaRMSNorm):
    """Gemma's RMS norm, whose weight is one more than what is stored."""

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        return _norm(x, residual, self.weight.data, self.variance_epsilon, 1.0)


class RowInvariantRMSNormGated(_EveryDevice, RMSNormGated):
    """Gated RMS norm whose row depends on that row alone."""

    def forward_native(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        if z is None or self.group_size is not None or not self.norm_before_gate:
            raise NotImplementedError("only the gated norm of Qwen's gated delta net is covered")
        y: torch.Tensor = torch.ops.vllm_b70.gated_rms_norm(
            x, z, self.weight, self.eps, self.activation == "sigmoid"
        )
        return y


def register() -> None:
    """Let vLLM build our norms in place of its own, on the CPU."""
    RMSNormGated.register_oot(RowInvariantRMSNormGated, name="RMSNormGated")


def register_gpu() -> None:
    """The same on a GPU."""
    register()
    RMSNorm.register_oot(RowInvariantRMSNorm, name="RMSNorm")
    GemmaRMSNorm.register_oot(RowInvariantGemmaRMSNorm, name="GemmaRMSNorm")
