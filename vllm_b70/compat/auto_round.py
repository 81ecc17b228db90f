"""Patch: 4-bit AutoRound layers go through vLLM's registry of linear kernels, and so to ours.

what      INCWna16Scheme.get_linear_method
why       vLLM 0.32 gives AutoRound layers on an XPU to kernels of their own, past the registry:
          ARK, whose result depends on the number of rows, or oneDNN
upstream  not reported yet
versions  0.32
remove    when INC's scheme asks ``choose_mp_linear_kernel`` on every device; tests/xpu fails then
"""

from __future__ import annotations

from typing import Any

from vllm_b70.compat.seams import require


def apply() -> None:
    """Replace the scheme's choice."""
    require("auto_round_scheme", "gptq_config")
    from vllm.model_executor.layers.quantization.auto_gptq import (
        AutoGPTQConfig,
        AutoGPTQLinearMethod,
    )
    from vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_scheme import INCWna16Scheme

    from vllm_b70.plugin import PluginError

    def get_linear_method(
        self: Any, config: Any, layer: Any, prefix: str, layer_config: Any
    ) -> AutoGPTQLinearMethod:
        if layer_config.bits != 4 or not layer_config.sym or not layer_config.is_gptq:
            raise PluginError(
                f"VLLM_B70=1 has no exact kernel for the AutoRound layer {prefix} "
                f"({layer_config.bits} bits, sym {layer_config.sym}, "
                f"{layer_config.packing_format}): export with 4 bits, sym and "
                "auto_round:auto_gptq, or set VLLM_B70=0."
            )
        # What a checkpoint relabelled as GPTQ would get; the tensors are the same.
        return AutoGPTQLinearMethod(
            AutoGPTQConfig(
                weight_bits=4,
                group_size=layer_config.group_size,
                desc_act=False,
                is_sym=True,
                lm_head_quantized=False,
                dynamic={},
                full_config={},
            )
        )

    INCWna16Scheme.get_linear_method = get_linear_method  # type: ignore[method-assign]
