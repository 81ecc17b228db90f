"""4-bit copies of weights that only drafts are made with: the lm_head's, and the MTP layer's own.

The target keeps its weights: nothing here writes to them, and a wrong draft costs its verification
and no token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.kernels.linear.mixed_precision import MPLinearLayerConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.models.registry import ModelRegistry
from vllm.scalar_type import scalar_types

from vllm_b70.layers.int4_linear import (
    CpuInt4LinearKernel,
    GpuInt4LinearKernel,
    RowInvariantInt4LinearKernel,
)
from vllm_b70.layers.linear import RowInvariantEmbeddingMethod, RowInvariantLinearMethod
from vllm_b70.plugin import PluginError
from vllm_b70.settings import Settings

logger = logging.getLogger("vllm.vllm_b70")

#: Values that share a scale in the MTP layer's linears.
LAYER_GROUP = 128


def quantised(
    layer: torch.nn.Module,
    weight: torch.Tensor,
    rows: torch.Tensor | None,
    group: int,
    switch: str,
    what: str,
) -> RowInvariantInt4LinearKernel:
    """Register on ``layer`` the 4-bit form of a weight.

    Args:
        layer: Gets buffers that no checkpoint holds.
        weight: [N, K] bf16 or fp16; it is only read.
        rows: The rows to take, or None for all.
        group: Values of k that share a scale.
        switch, what: The switch and the weight, as an error names them.

    Returns:
        The kernel that multiplies by it.

    Raises:
        PluginError: The weight cannot be quantised.
    """
    kernel_class = CpuInt4LinearKernel if weight.device.type == "cpu" else GpuInt4LinearKernel
    shape = (weight.shape[1], weight.shape[0] if rows is None else rows.shape[0])
    config = MPLinearLayerConfig(shape, shape, scalar_types.uint4b8, weight.dtype, group, False)
    fits, why = kernel_class.can_implement(config)
    kernel = kernel_class(config, "", "", None)
    if fits:
        try:
            kernel.quantise(layer, weight, rows)
            return kernel
        except ValueError as error:
            why = str(error)
    raise PluginError(f"{switch} cannot be honoured for {what}: {why}; set it to none.")


class DraftHeadMethod(QuantizeMethodBase):
    """The lm_head's rows of all tokens, or of some, in 4 bit.

    Args:
        model: Its ``lm_head`` is what the checkpoint holds; read when it is loaded, not kept.
        group: Values that share a scale.
        listed: The only token ids to score, ascending, or None for all.
        source: What gives the list, as an error names it.
    """

    def __init__(
        self, model: Any, group: int, listed: Sequence[int] | None = None, source: str = ""
    ) -> None:
        self._model, self._group, self._listed, self._source = model, group, listed, source
        self._kernel: RowInvariantInt4LinearKernel | None = None

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: what the head holds is made of another layer's weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        switch = "VLLM_B70_DRAFT_HEAD=int4"
        if self._model is None:
            raise PluginError(
                f"{switch} cannot be honoured when weights are loaded again: the 4-bit draft head "
                "is made of an lm_head that is gone after the first time; start the server anew, "
                "or set it to none."
            )
        head = self._model.lm_head
        if not isinstance(head.quant_method, RowInvariantEmbeddingMethod):
            raise PluginError(
                f"{switch} cannot be honoured: the checkpoint's lm_head is no 16-bit weight "
                f"({type(head.quant_method).__name__}); set it to none."
            )
        shard = head.shard_indices
        layer.shard_indices, layer.tp_size = shard, head.tp_size
        first, last = shard.org_vocab_start_index, shard.org_vocab_end_index
        rows = None
        if self._listed is not None:
            here = [token - first for token in self._listed if first <= token < last]
            if not here:
                raise PluginError(
                    f"the shortlist {self._source} has no token of {first} to {last - 1}, which "
                    "this rank's shard of the lm_head holds: add some, or leave "
                    "VLLM_B70_DRAFT_SHORTLIST out."
                )
            rows = torch.tensor(here, device=head.weight.device)
        weight = head.weight.data[: last - first]
        self._kernel = quantised(layer, weight, rows, self._group, switch, "the lm_head")
        self._width = head.weight.shape[0]
        layer.register_buffer("b70_rows", rows, persistent=False)
        size = sum(buffer.nbytes for buffer in layer.buffers())
        count = len(weight) if rows is None else len(rows)
        logger.info("vllm_b70: 4-bit draft head of %d tokens, %.0f MiB", count, size / 2**20)
        # The model shares the target's lm_head from now on.
        self._model = None

    def _checked(self, bias: torch.Tensor | None) -> RowInvariantInt4LinearKernel:
        if self._kernel is None or bias is not None:
            raise ValueError("a draft head is used after loading, and without a bias")
        return self._kernel

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """A row of logits as wide as the shard, minus infinity for tokens that are not scored.

        Drafts that are sampled need it; greedy ones are made by ``best``.
        """
        scored = self._checked(bias).apply_weights(layer, x)
        if scored.shape[-1] == self._width:
            return scored
        logits = scored.new_full((*scored.shape[:-1], self._width), float("-inf"))
        if layer.b70_rows is None:
            logits[..., : scored.shape[-1]] = scored
        else:
            logits[..., layer.b70_rows] = scored
        return logits

    def best(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row, [M] fp32, and the lowest of its rows of the shard."""
        value, index = self._checked(bias).best(layer, x)
        return value, index if layer.b70_rows is None else layer.b70_rows[index]


class DraftHead(torch.nn.Module):
    """Stands where vLLM's logits processor expects an lm_head.

    Args:
        method: Makes its weight when vLLM processes what was loaded.
    """

    def __init__(self, method: DraftHeadMethod) -> None:
        super().__init__()
        self.quant_method = method


class DraftLinearMethod(RowInvariantLinearMethod):
    """A linear that is loaded in 16 bit and kept in 4."""

    _kernel: RowInvariantInt4LinearKernel

    def process_weights_after_loading(self, layer: Any) -> None:
        self._kernel = quantised(
            layer, layer.weight.data, None, LAYER_GROUP, "VLLM_B70_DRAFT_LAYER=int4", layer.prefix
        )
        layer.weight = torch.nn.Parameter(layer.weight.data.new_empty(0), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernel.apply_weights(layer, x, bias)


def quantise_linears(model: torch.nn.Module) -> None:
    """Let the 16-bit linears of a draft model be quantised when they have been loaded.

    Those that the checkpoint holds in 4 bit stay as they are, which is logged.
    """
    linears = [module for module in model.modules() if isinstance(module, LinearBase)]
    loaded = [m for m in linears if type(m.quant_method) is RowInvariantLinearMethod]
    for module in loaded:
        module.quant_method = DraftLinearMethod()
    logger.info(
        "vllm_b70: VLLM_B70_DRAFT_LAYER=int4 quantises %d linears of the MTP layer; %d are in 4 "
        "bit in the checkpoint and stay as they are",
        len(loaded),
        len(linears) - len(loaded),
    )


def register(settings: Settings) -> None:
    """Let vLLM build our draft model in place of its own, where a switch asks for it."""
    if settings.draft_head == "int4" or settings.draft_layer == "int4":
        ModelRegistry.register_model("Qwen3_5MTP", "vllm_b70.layers.draft_model:DraftModel")
