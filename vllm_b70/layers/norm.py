"""The gated RMS norm over ``ops.norm``, in eager and compiled mode alike.

Official seam: the out-of-tree class of vLLM's ``RMSNormGated``. vLLM's other norms reduce each row
by itself, and its 16-bit activations give the same values in every lane of torch's loops.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.layernorm import RMSNormGated

from vllm_b70.compat.seams import require
from vllm_b70.ops import norm  # noqa: F401  (defines the op)

require("gated_norm")


class RowInvariantRMSNormGated(RMSNormGated):
    """Gated RMS norm whose row depends on that row alone."""

    def forward_native(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        if z is None or self.group_size is not None or not self.norm_before_gate:
            raise NotImplementedError("only the gated norm of Qwen's gated delta net is covered")
        y: torch.Tensor = torch.ops.vllm_b70.gated_rms_norm(
            x, z, self.weight, self.eps, self.activation == "sigmoid"
        )
        return y

    def forward_cpu(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        return self.forward_native(x, z)


def register() -> None:
    """Let vLLM build our norm in place of its own."""
    RMSNormGated.register_oot(RowInvariantRMSNormGated, name="RMSNormGated")
