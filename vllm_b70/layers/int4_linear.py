"""vLLM's mixed-precision linear kernels over our ops: one for the CPU, one for CUDA and XPU.

Both read both checkpoint layouts: what a dimension of a parameter means is read from the parameter
(``input_dim``, ``output_dim``, ``packed_dim``), never guessed from its shape.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS, register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from vllm_b70.compat.seams import require
from vllm_b70.layers import native
from vllm_b70.layers.logits_processor import without_nan
from vllm_b70.ops import int4_argmax, int4_gemm, int4_linear, int4_quantise, int4_words  # noqa: F401
from vllm_b70.ops import native as vendor
from vllm_b70.ops.row_classes import Gemm
from vllm_b70.settings import NATIVE

require("mp_kernel_config")

NIBBLES = 8  # 4-bit values in an int32


def unpack_nibbles(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Unpack int32 words into their 8 nibbles, lowest first, along ``dim``.

    Returns:
        uint8, ``dim`` 8 times as long.
    """
    words = packed.movedim(dim, -1)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(-2).movedim(-1, dim)


def inputs_first(tensor: torch.Tensor, output_dim: int) -> torch.Tensor:
    """A matrix with the output dimension last."""
    return tensor if output_dim == 1 else tensor.t()


class PackedWeight:
    """The 4-bit values of a layer's checkpoint parameter, read a slice of K at a time."""

    def __init__(self, parameter: Any, depth: int, columns: int) -> None:
        self._data = parameter.data
        self._input_dim, self._output_dim = parameter.input_dim, parameter.output_dim
        self._packed_dim = parameter.packed_dim
        self.depth, self.columns = depth, columns
        if self._packed_dim != self._input_dim:
            raise ValueError("the weight's values are packed along its outputs, not its inputs")
        shape = [0, 0]
        shape[self._input_dim], shape[self._output_dim] = -(-depth // NIBBLES), columns
        if list(self._data.shape) != shape:
            raise ValueError(
                f"the packed weight is {(*self._data.shape,)}, but K={depth} and N={columns} need "
                f"{(*shape,)}: the checkpoint's shapes contradict its configuration."
            )

    def packed(self) -> torch.Tensor:
        """The words as loaded, [N, K / 8] int32: 8 values of k in a word, the lowest first."""
        words = self._data if self._output_dim == 0 else self._data.t()
        return words.contiguous()

    def to_host(self) -> PackedWeight:
        """Move the packed values to the host, so that the device holds one copy at a time."""
        self._data = self._data.cpu()
        return self

    def values(self, first: int, last: int) -> torch.Tensor:
        """k from first, a multiple of 8, to last as integers 0..15, [last - first, N]."""
        words = self._data.narrow(
            self._input_dim, first // NIBBLES, -(-last // NIBBLES) - first // NIBBLES
        )
        q = inputs_first(unpack_nibbles(words, self._packed_dim), self._output_dim)
        return q[: last - first]


class RowInvariantInt4LinearKernel(MPLinearKernel):
    """What both devices share: reading the checkpoint's layout."""

    #: Group sizes that the device's kernel covers, or None for any.
    groups: tuple[int, ...] | None = None

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
        if cls.groups is not None and c.group_size not in (-1, *cls.groups):
            return False, f"group size {c.group_size} is not covered, only {cls.groups} and -1"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        depth, columns = self.config.partition_weight_shape
        weight = PackedWeight(getattr(layer, self.w_q_name), depth, columns)
        scales = getattr(layer, self.w_s_name)
        scale = inputs_first(scales.data, scales.output_dim)
        zero = None
        if self.config.zero_points:
            assert self.w_zp_name is not None
            zeros = getattr(layer, self.w_zp_name)
            zero = unpack_nibbles(zeros.data, zeros.packed_dim)
            zero = inputs_first(zero, zeros.output_dim)[:, :columns].contiguous()
        # The checkpoint's own parameters go: the layouts are not compatible.
        for name in (self.w_q_name, self.w_s_name, self.w_zp_name):
            if name is not None and hasattr(layer, name):
                delattr(layer, name)
        group_size = depth if self.config.group_size == -1 else self.config.group_size
        self.pack(layer, weight, scale, zero, group_size)

    def pack(
        self,
        layer: torch.nn.Module,
        weight: PackedWeight,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        group_size: int,
    ) -> None:
        """Register the device's form of the weight on ``layer``.

        Args:
            layer: Gets buffers that no checkpoint holds.
            weight: The 4-bit values.
            scale: [K / group_size, N].
            zero: [K / group_size, N] uint8 or None.
            group_size: Values of k that share a scale.
        """
        raise NotImplementedError

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self.multiply(layer, x.reshape(-1, x.shape[-1]), bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    def multiply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[M, K] to [M, N]."""
        raise NotImplementedError

    def quantise(self, layer: Any, weight: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Register on ``layer`` the 4-bit form of a 16-bit weight, [N, K], or of some of its rows.

        Raises:
            ValueError: A value of the weight is not finite.
        """
        raise NotImplementedError

    def best(self, layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest of each row of ``multiply``, [M] fp32, and its lowest column, [M] int64; a
        NaN counts as minus infinity."""
        raise NotImplementedError


class CpuInt4LinearKernel(RowInvariantInt4LinearKernel):
    """W4A16 on the CPU."""

    op = "int4_linear"

    def pack(
        self,
        layer: torch.nn.Module,
        weight: PackedWeight,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        group_size: int,
    ) -> None:
        nibbles = int4_linear.pack_int4(weight.values(0, weight.depth))
        self.hold(layer, nibbles, scale.float().contiguous(), zero, group_size)

    def hold(
        self,
        layer: torch.nn.Module,
        nibbles: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        group_size: int,
    ) -> None:
        """Register on ``layer`` what ``ops.int4_linear`` reads."""
        layer.register_buffer("b70_weight", nibbles, persistent=False)
        layer.register_buffer("b70_scale", scale, persistent=False)
        layer.register_buffer("b70_zero", zero, persistent=False)
        self.group_size = group_size

    def quantise(self, layer: Any, weight: torch.Tensor, rows: torch.Tensor | None) -> None:
        group = self.config.group_size
        self.hold(layer, *int4_quantise.quantise_nibbles(weight, rows, group), None, group)

    def best(self, layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, index = without_nan(self.multiply(layer, x, None)).max(dim=-1)
        return value.float(), index

    def multiply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        op = getattr(torch.ops.vllm_b70, self.op)
        y: torch.Tensor = op(
            x, layer.b70_weight, layer.b70_scale, layer.b70_zero, bias, self.group_size
        )
        return y


class NaiveInt4LinearKernel(CpuInt4LinearKernel):
    """The control: BLAS over dequantised weights (``VLLM_B70_LINEAR=naive``)."""

    op = "int4_linear_naive"


class GpuInt4LinearKernel(RowInvariantInt4LinearKernel):
    """W4A16 on CUDA and XPU, in Triton."""

    groups = int4_words.GROUPS

    def pack(
        self,
        layer: torch.nn.Module,
        weight: PackedWeight,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        group_size: int,
    ) -> None:
        weight.to_host()
        packed = int4_words.pack_words(
            weight.values, weight.depth, weight.columns, scale, zero, group_size,
            self.config.act_type,
        )  # fmt: skip
        self.hold(layer, packed)

    def hold(self, layer: torch.nn.Module, packed: int4_words.Int4Words) -> None:
        """Register on ``layer`` what ``ops.int4_gemm`` reads."""
        done = torch.zeros(
            int4_gemm.counters(packed.columns), dtype=torch.int32, device=packed.words.device
        )
        layer.register_buffer("b70_words", packed.words, persistent=False)
        layer.register_buffer("b70_scale", packed.scale, persistent=False)
        layer.register_buffer("b70_offset", packed.offset, persistent=False)
        layer.register_buffer("b70_done", done, persistent=False)
        self.columns, self.group = packed.columns, packed.group

    def quantise(self, layer: Any, weight: torch.Tensor, rows: torch.Tensor | None) -> None:
        self.hold(layer, int4_quantise.quantise_words(weight, rows, self.config.group_size))

    def best(self, layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, index = torch.ops.vllm_b70.int4_argmax(
            x, layer.b70_words, layer.b70_scale, self.columns, self.group
        )
        return value, index

    def multiply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = torch.ops.vllm_b70.int4_gemm(
            x, layer.b70_words, layer.b70_scale, layer.b70_offset, bias, layer.b70_done,
            self.columns, self.group, 0,
        )  # fmt: skip
        return y


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Inverse of ``unpack_nibbles`` along the last dimension: int32, 8 values in a word."""
    words = values.unflatten(-1, (-1, NIBBLES)).to(torch.int32)
    packed = words[..., 0].clone()
    for i in range(1, NIBBLES):
        packed |= words[..., i] << 4 * i
    return packed


class NativeInt4LinearKernel(GpuInt4LinearKernel):
    """W4A16 on an XPU by Intel's kernel, or by ours where a layer's route says so.

    A layer loads in the form of Intel's kernel, which is the checkpoint's own order of values, and
    is packed anew for ours if need be.
    """

    def pack(
        self,
        layer: torch.nn.Module,
        weight: PackedWeight,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        group_size: int,
    ) -> None:
        depth, columns = weight.depth, weight.columns
        if depth % 32 or group_size % 32 or columns % NIBBLES or not vendor.has_int4_gemm():
            super().pack(layer, weight, scale, zero, group_size)
            return
        dtype = self.config.act_type
        zeros = torch.full((1,), 8, dtype=torch.int8, device=scale.device)
        if zero is not None:
            zeros = pack_nibbles(zero)
        packed = weight.packed()
        layer.register_buffer("b70_packed", packed, persistent=False)
        layer.register_buffer("b70_scale", scale.to(dtype).contiguous(), persistent=False)
        layer.register_buffer("b70_zeros", zeros, persistent=False)
        layer.register_buffer("b70_zero", zero, persistent=False)
        self.columns, self.group = columns, group_size
        shape = f"{columns}x{depth} group {group_size}" + ("" if zero is None else " asymmetric")
        native.wait(
            "int4_linear", f"{shape} {str(dtype).removeprefix('torch.')}", columns, depth, dtype,
            packed, layer, self,
        )  # fmt: skip

    def vendor(self, layer: Any) -> Gemm:
        """As ``native.Method``."""
        return vendor.int4_gemm(layer.b70_packed, layer.b70_scale, layer.b70_zeros, self.group)

    def _words(self, layer: Any) -> int4_words.Int4Words:
        def values(first: int, last: int) -> torch.Tensor:
            part = layer.b70_packed[:, first // NIBBLES : -(-last // NIBBLES)]
            return unpack_nibbles(part, 1).t()[: last - first]

        depth = layer.b70_packed.shape[1] * NIBBLES
        return int4_words.pack_words(
            values, depth, self.columns, layer.b70_scale, layer.b70_zero, self.group,
            self.config.act_type,
        )  # fmt: skip

    def own(self, layer: Any) -> Gemm:
        """As ``native.Method``."""
        packed = self._words(layer)
        done = torch.zeros(
            int4_gemm.counters(packed.columns), dtype=torch.int32, device=packed.words.device
        )
        return lambda x: torch.ops.vllm_b70.int4_gemm(
            x, packed.words, packed.scale, packed.offset, None, done, packed.columns,
            packed.group, 0,
        )  # fmt: skip

    def keep_own(self, layer: Any) -> None:
        """As ``native.Method``."""
        packed = self._words(layer)
        del layer.b70_packed, layer.b70_zeros, layer.b70_zero
        self.hold(layer, packed)

    def multiply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        spans = native.spans_of(layer)
        if not spans:
            return super().multiply(layer, x, bias)
        y: torch.Tensor = torch.ops.vllm_b70.native_int4_linear(
            x, layer.b70_packed, layer.b70_scale, layer.b70_zeros, bias, self.group, spans
        )
        return y


def register(linear: str) -> None:
    """Make our kernels the ones vLLM picks for 4-bit weights.

    vLLM appends to its lists and picks the first that fits, so the others are switched off through
    its own variable, VLLM_DISABLED_KERNELS.

    Args:
        linear: ``triton``, ``native``, ``auto`` or ``naive``; a vendor's kernel is known on an XPU
            only.
    """
    native_too = linear in NATIVE
    ours = {
        PlatformEnum.CPU: NaiveInt4LinearKernel if linear == "naive" else CpuInt4LinearKernel,
        PlatformEnum.CUDA: GpuInt4LinearKernel,
        PlatformEnum.XPU: NativeInt4LinearKernel if native_too else GpuInt4LinearKernel,
    }
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
    for platform, kernel in ours.items():
        disabled += [k.__name__ for k in _POSSIBLE_KERNELS.get(platform, [])]
        register_linear_kernel(kernel, platform, "mp")
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(dict.fromkeys(name for name in disabled if name))
