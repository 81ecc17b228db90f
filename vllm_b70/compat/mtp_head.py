"""Patch: speculation on a checkpoint without an MTP head is refused with a reason.

what      EngineArgs.create_speculative_config
why       vLLM 0.32 divides by the number of MTP layers and stops with "integer modulo by zero"
upstream  not reported yet
versions  0.32
remove    when vLLM names the reason itself; tests/compat fails then
"""

from __future__ import annotations

from typing import Any

from vllm_b70.compat.seams import require


def apply() -> None:
    """Check for an MTP head before vLLM builds the speculative configuration."""
    require("speculative_config")
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_speculative_config

    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        method = (self.speculative_config or {}).get("method") or self.spec_method
        layers = getattr(target_model_config.hf_text_config, "mtp_num_hidden_layers", None)
        # vLLM still takes the names that it had for "mtp", one for each kind of model.
        if (method == "mtp" or str(method).endswith("_mtp")) and layers == 0:
            raise ValueError(
                f"VLLM_B70=1 cannot honour speculative decoding: the checkpoint "
                f"{target_model_config.model} has mtp_num_hidden_layers 0, so there is no MTP head "
                "to draft with; use a checkpoint with one, or leave --speculative-config out."
            )
        return original(self, target_model_config, target_parallel_config)

    EngineArgs.create_speculative_config = create_speculative_config  # type: ignore[method-assign]
