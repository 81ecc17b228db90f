"""vLLM's mixed-precision linear kernel over ``ops.int4_linear``.

One class for both checkpoint layouts: what a dimension of a parameter means is read from the
parameter (``input_dim``, ``output_dim``, ``packed_dim``), never guessed from its shape.
"""

from __future__ import annotations

import os

import torch
from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS, register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from vllm_b70.compat.seams import require
from vllm_b70.ops.int4_linear import pack_int4

require("mp_kernel_config")


def unpack_nibbles(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Unpack int32 words into their 8 nibbles, lowest first, along ``dim``.

    Returns:
        uint8, ``dim`` 8 times as long.
    """
    words = packed.movedim(dim, -1)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(-2).movedim(-1, dim)


def inputs_first(tensor: torch.Tensor, output_dim: int) -> torch.Tensor:
    """A matrix with the output dimension last."""
    return tensor if output_dim == 1 else tensor.t()


class RowInvariantInt4LinearKernel(MPLinearKernel):
    """W4A16 linear in one order of addition for every row count."""

    op = "int4_linear"

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.weight_type not in (scalar_types.uint4b8, scalar_types.uint4):
            return False, f"weights of type {c.weight_type} are not covered, only 4-bit ones"
        if c.act_type not in (torch.bfloat16, torch.float16):
            return False, f"activations in {c.act_type} are not covered, only 16-bit ones"
        depth = c.partition_weight_shape[0]
        if c.group_size != -1 and (c.group_size < 1 or depth % c.group_size):
            return False, f"group size {c.group_size} does not divide K={depth}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        depth, columns = self.config.partition_weight_shape
        packed = getattr(layer, self.w_q_name)
        q = unpack_nibbles(packed.data, packed.packed_dim)
        q = inputs_first(q, packed.output_dim)[:depth]
        scales = getattr(layer, self.w_s_name)
        scale = inputs_first(scales.data, scales.output_dim)
        zero = None
        if self.config.zero_points:
            assert self.w_zp_name is not None
            zeros = getattr(layer, self.w_zp_name)
            zero = unpack_nibbles(zeros.data, zeros.packed_dim)
            zero = inputs_first(zero, zeros.output_dim)[:, :columns].contiguous()
        if q.shape != (depth, columns):
            raise ValueError(
                f"{self.w_q_name} unpacks to {(*q.shape,)}, but the layer is {(depth, columns)}: "
                "the checkpoint's shapes contradict its configuration."
            )
        # Buffers, and the checkpoint's own parameters dropped: the layouts are not compatible.
        for name in (self.w_q_name, self.w_s_name, self.w_zp_name):
            if name is not None and hasattr(layer, name):
                delattr(layer, name)
        layer.register_buffer("b70_weight", pack_int4(q), persistent=False)
        layer.register_buffer("b70_scale", scale.float().contiguous(), persistent=False)
        layer.register_buffer("b70_zero", zero, persistent=False)
        self.group_size = depth if self.config.group_size == -1 else self.config.group_size

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        op = getattr(torch.ops.vllm_b70, self.op)
        y = op(
            x.reshape(-1, x.shape[-1]),
            layer.b70_weight,
            layer.b70_scale,
            layer.b70_zero,
            bias,
            self.group_size,
        )
        return y.view(*x.shape[:-1], y.shape[-1])


class NaiveInt4LinearKernel(RowInvariantInt4LinearKernel):
    """The control: BLAS over dequantised weights (``VLLM_B70_LINEAR=naive``)."""

    op = "int4_linear_naive"


def register(linear: str) -> None:
    """Make our kernel the one vLLM picks for 4-bit weights on the CPU.

    vLLM appends to its list and picks the first that fits, so the others are switched off through
    its own variable, VLLM_DISABLED_KERNELS.

    Args:
        linear: ``exact`` or ``naive``.
    """
    kernel = NaiveInt4LinearKernel if linear == "naive" else RowInvariantInt4LinearKernel
    stock = [k.__name__ for k in _POSSIBLE_KERNELS[PlatformEnum.CPU]]
    register_linear_kernel(kernel, PlatformEnum.CPU, "mp")
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(
        dict.fromkeys(name for name in [*disabled, *stock] if name)
    )
