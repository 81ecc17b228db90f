"""16-bit linears and the lm_head over ``ops.linear``.

Official seam: vLLM builds an out-of-tree class in place of its own when one is registered under the
same name. The classes here differ from vLLM's in the quantisation method they end up with, and keep
vLLM's class names because quantisation configurations match modules by them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers import vocab_parallel_embedding as vllm_embedding

from vllm_b70.compat.seams import require
from vllm_b70.layers import native
from vllm_b70.ops import gemm
from vllm_b70.ops import linear as ops
from vllm_b70.ops import native as vendor
from vllm_b70.ops.row_classes import Gemm
from vllm_b70.plugin import PluginError

require("linear_method", "embedding_method")

LINEARS = (
    vllm_linear.ReplicatedLinear,
    vllm_linear.ColumnParallelLinear,
    vllm_linear.MergedColumnParallelLinear,
    vllm_linear.QKVParallelLinear,
    vllm_linear.RowParallelLinear,
)
EMBEDDINGS = (vllm_embedding.VocabParallelEmbedding, vllm_embedding.ParallelLMHead)


#: Methods that end in our INT4 kernel, which vLLM picks for them (layers.int4_linear).
INT4_METHODS = (
    "CompressedTensorsLinearMethod",
    "AutoGPTQLinearMethod",
    "AutoAWQMarlinLinearMethod",
)
INT4_SCHEME = "CompressedTensorsWNA16"


def check_method(layer: Any) -> None:
    """Refuse a layer whose GEMM would be neither ours nor go through our INT4 kernel.

    Raises:
        PluginError: One sentence with the layer, its method and what to do.
    """
    method = type(layer.quant_method).__name__
    scheme = getattr(layer, "scheme", None)
    if isinstance(layer.quant_method, (RowInvariantLinearMethod, RowInvariantEmbeddingMethod)):
        return
    if method in INT4_METHODS and (scheme is None or type(scheme).__name__ == INT4_SCHEME):
        return
    name = method if scheme is None else f"{method} with {type(scheme).__name__}"
    raise PluginError(
        f"VLLM_B70=1 has no exact kernel for the layer {getattr(layer, 'prefix', '?')} ({name}): "
        "use a checkpoint with 4-bit or 16-bit weights, or set VLLM_B70=0."
    )


def prepare(layer: Any, weight: torch.Tensor) -> None:
    """Register on a layer what ``multiply`` needs beside its weight, [N, K].

    On a CPU that is a transposed copy of the weight; elsewhere the weight serves as it is and the
    kernel needs its counters.
    """
    if weight.device.type == "cpu":
        layer.register_buffer("b70_weight", ops.pack(weight), persistent=False)
        return
    size = gemm.counters(weight.shape[0])
    done = getattr(layer, "b70_done", None)
    # Weights that are loaded again keep their counters: captured graphs know the address.
    if done is None or done.shape != (size,) or done.device != weight.device:
        done = torch.zeros(size, dtype=torch.int32, device=weight.device)
        layer.register_buffer("b70_done", done, persistent=False)


def multiply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The linear op over any leading dimensions of ``x``; it stays opaque to torch.compile."""
    rows = x.reshape(-1, x.shape[-1])
    if spans := native.spans_of(layer):
        y = torch.ops.vllm_b70.native_linear(rows, layer.weight, bias, spans)
    elif hasattr(layer, "b70_done"):
        y = torch.ops.vllm_b70.gemm(rows, layer.weight, bias, layer.b70_done, 0)
    else:
        y = torch.ops.vllm_b70.linear(rows, layer.b70_weight, bias)
    return y.view(*x.shape[:-1], y.shape[-1])


class Routes:
    """What either route does with a 16-bit weight (``native.Method``)."""

    def wait(self, op: str, layer: Any) -> None:
        """Let the layer wait for its route."""
        columns, depth = layer.weight.shape
        shape = f"{columns}x{depth} {str(layer.weight.dtype).removeprefix('torch.')}"
        native.wait(
            op, shape, columns, depth, layer.weight.dtype, layer.weight.data, layer, self
        )  # fmt: skip

    def vendor(self, layer: Any) -> Gemm:
        return vendor.linear_gemm(layer.weight)

    def own(self, layer: Any) -> Gemm:
        weight = layer.weight.data
        if weight.device.type == "cpu":
            packed = ops.pack(weight)
            return lambda x: torch.ops.vllm_b70.linear(x, packed, None)
        return lambda x: torch.ops.vllm_b70.gemm(x, weight, None, layer.b70_done, 0)

    def keep_own(self, layer: Any) -> None:
        prepare(layer, layer.weight.data)


class RowInvariantLinearMethod(Routes, vllm_linear.UnquantizedLinearMethod):
    """16-bit linear in one order of addition for every row count."""

    def process_weights_after_loading(self, layer: Any) -> None:
        # The gated delta net keeps the weight of its convolution, [D, 1, W], in a linear layer.
        if layer.weight.dim() != 2:
            return
        # Images are served without the promise.
        if not native.wanted() or "visual" in layer.prefix.split("."):
            self.keep_own(layer)
            return
        if layer.weight.device.type != "cpu":
            prepare(layer, layer.weight.data)
        self.wait("linear", layer)

    def keep_own(self, layer: Any) -> None:
        prepare(layer, layer.weight.data)
        if hasattr(layer, "b70_weight"):
            layer.weight = torch.nn.Parameter(layer.weight.data.new_empty(0), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return multiply(layer, x, bias)


class RowInvariantEmbeddingMethod(Routes, vllm_embedding.UnquantizedEmbeddingMethod):
    """Embedding and lm_head; the look-up needs the weight as it is, so what the head needs is made
    beside it: for a head at load, for tied embeddings on a CPU at the first use as a head."""

    def process_weights_after_loading(self, layer: Any) -> None:
        head = isinstance(layer, vllm_embedding.ParallelLMHead)
        if layer.weight.device.type != "cpu":
            prepare(layer, layer.weight.data)
        elif head and not native.wanted():
            prepare(layer, layer.weight.data)
        if head and native.wanted():
            self.wait("lm_head", layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ready = native.spans_of(layer) or hasattr(layer, "b70_weight")
        if not ready and not hasattr(layer, "b70_done"):
            prepare(layer, layer.weight.data)
        return multiply(layer, x, bias)

    def best(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The largest logit of each row, [M] fp32, and its lowest row of the shard, [M] int64; None
        on a CPU, where there is no such kernel."""
        if not hasattr(layer, "b70_done"):
            return None
        columns = layer.weight.shape[0] - layer.shard_indices.num_org_vocab_padding
        bias = None if bias is None else bias[:columns]
        value, index = torch.ops.vllm_b70.gemm_argmax(
            x, layer.weight[:columns], bias, gemm.parts_of(layer.weight)
        )
        return value, index


def _out_of_tree(base: type, stock: type, method: type) -> type:
    """A subclass of ``base`` whose plain quantisation method, ``stock``, is ours."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]
        # AutoRound's configuration gives a plain lm_head the method of a plain linear.
        if type(self.quant_method) in (stock, vllm_linear.UnquantizedLinearMethod):
            self.quant_method = method()
        check_method(self)

    return type(base.__name__, (base,), {"__init__": __init__, "__module__": __name__})


def register() -> None:
    """Let vLLM build our linear and embedding classes in place of its own."""
    for base in LINEARS:
        ours = _out_of_tree(base, vllm_linear.UnquantizedLinearMethod, RowInvariantLinearMethod)
        base.register_oot(ours, name=base.__name__)
    for base in EMBEDDINGS:
        ours = _out_of_tree(
            base, vllm_embedding.UnquantizedEmbeddingMethod, RowInvariantEmbeddingMethod
        )
        base.register_oot(ours, name=base.__name__)
