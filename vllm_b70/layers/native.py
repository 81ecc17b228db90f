"""Linears that wait for their route, the vendor's kernel or our own, until all weights are loaded.

Under ``VLLM_B70_LINEAR=native`` or ``auto`` a layer loads in the vendor's form and waits here;
``census.linears`` asks the vendor's kernel, and settles all layers of a shape alike. A layer that
nobody settled multiplies nothing.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_b70.ops import native
from vllm_b70.ops.row_classes import Gemm
from vllm_b70.plugin import PluginError
from vllm_b70.settings import NATIVE, current

#: The attribute of a layer: spans of its class, () for our own kernel, None while it waits.
SPANS = "b70_native"


class Method(Protocol):
    """What a layer's method can do for either route."""

    def vendor(self, layer: Any) -> Gemm:
        """The vendor's GEMM over the layer's weight, [M, K] to [M, N]."""

    def own(self, layer: Any) -> Gemm:
        """Our kernel over the same weight; what it needs may be made, and is not kept."""

    def keep_own(self, layer: Any) -> None:
        """Bring the layer into our kernel's form for good."""


@dataclass(frozen=True)
class Waiting:
    """A layer without a route.

    Attributes:
        op: ``linear``, ``lm_head`` or ``int4_linear``.
        shape: Columns, depth and what else makes a weight distinct.
        columns, depth: N and K.
        dtype: Of the rows.
        device: Of the weight.
        nbytes: Of the weight.
        layer: A weak reference: what is not there any more needs no route.
        method: Its method.
    """

    op: str
    shape: str
    columns: int
    depth: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    layer: Any
    method: Method

    def settle(self, spans: tuple[int, ...]) -> None:
        """Give the layer its route.

        Args:
            spans: Of the vendor's certified class; empty for our own kernel.
        """
        layer = self.layer()
        if layer is None:
            return
        if spans:
            native.reserve(self.device, self.dtype, self.depth, spans[-2])
        else:
            self.method.keep_own(layer)
        setattr(layer, SPANS, spans)


_waiting: list[Waiting] = []


def wanted() -> bool:
    """Whether this process's switch asks for the vendor's kernels."""
    return current().linear in NATIVE


def wait(
    op: str, shape: str, columns: int, depth: int, dtype: torch.dtype, weight: torch.Tensor,
    layer: Any, method: Method,
) -> None:  # fmt: skip
    """Let a layer wait for its route; weights that are loaded again keep the one they have.

    Raises:
        PluginError: The weight does not lie where a vendor's operand has to.
    """
    if not weight.is_contiguous() or not native.is_aligned(weight):
        raise PluginError(
            f"VLLM_B70_LINEAR={current().linear} cannot be honoured for a weight {shape}: it does "
            f"not begin at a multiple of {native.alignment(weight.device)} bytes or has gaps; set "
            "it to triton."
        )
    spans = getattr(layer, SPANS, None)
    if spans is not None:
        if not spans:
            method.keep_own(layer)
        return
    setattr(layer, SPANS, None)
    _waiting.append(
        Waiting(
            op, shape, columns, depth, dtype, weight.device, weight.nbytes, weakref.ref(layer),
            method,
        )
    )  # fmt: skip


def take_waiting() -> list[Waiting]:
    """The layers that wait, in the order in which they were loaded; the list is empty then."""
    found = [w for w in _waiting if w.layer() is not None]
    _waiting.clear()
    return found


def spans_of(layer: Any) -> tuple[int, ...]:
    """The spans of a layer's class; empty if our own kernel serves it.

    Raises:
        PluginError: The layer still waits.
    """
    spans: tuple[int, ...] | None = getattr(layer, SPANS, ())
    if spans is None:
        raise PluginError(
            f"VLLM_B70_LINEAR={current().linear}, but no route was chosen for the layer "
            f"{getattr(layer, 'prefix', '?')} when the weights were loaded: leave --worker-cls out."
        )
    return spans
