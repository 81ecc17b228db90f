"""How the gated delta net's kernels are launched: data, made offline by the benchmark.

A launch can change a result (it holds K blocks, and warps that share a sum), so it is a function of
the device family and the number of value heads alone, never of a batch.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Launch:
    """How the recurrent kernel is launched.

    Attributes:
        block: Rows of a head's state in one program.
        warps: Warps of a program.
        overlap: Let a kernel start while the one before it ends (CUDA from sm90 on); cannot change
            a result.
        grf: Registers of an XPU thread, 128 or 256; 0 leaves it to the compiler.
    """

    block: int
    warps: int
    overlap: bool = False
    grf: int = 0


@functools.cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    text = resources.files("vllm_b70.ops").joinpath("gdn_launches.json").read_text()
    table: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return table


def _entry(kernel: str, device_family: str, heads: int) -> dict[str, Any]:
    """The kernel's entry of ``family:heads``, else that of ``family``, else the default."""
    table = _table()
    for key in (f"{device_family}:{heads}", device_family):
        if kernel in table.get(key, {}):
            return table[key][kernel]
    return table["default"][kernel]


def chunk_kernels() -> list[str]:
    """Names of the chunked kernels."""
    return [name for name in _table()["default"] if name != "recurrent"]


def chunk(kernel: str, device_family: str, heads: int) -> dict[str, int]:
    """Block sizes, warps and stages of a chunked kernel, and ``grf`` as in ``Launch`` or none.

    Args:
        kernel: One of ``chunk_kernels()``.
        device_family: From ``tiles.family``.
        heads: Value heads.
    """
    return dict(_entry(kernel, device_family, heads))


@functools.cache
def recurrent(device_family: str, heads: int) -> Launch:
    """The launch of the recurrent kernel; arguments as for ``chunk``."""
    return Launch(**_entry("recurrent", device_family, heads))
