"""The one configuration of each chunked kernel: data, made offline by the benchmark.

A configuration can change a result (it holds K blocks), so it is a function of the device family
and the number of value heads alone.
"""

from __future__ import annotations

import functools
import json
from importlib import resources


@functools.cache
def _table() -> dict[str, dict[str, dict[str, int]]]:
    text = resources.files("vllm_b70.ops").joinpath("chunk_launches.json").read_text()
    table: dict[str, dict[str, dict[str, int]]] = json.loads(text)
    return table


def kernels() -> list[str]:
    """Names of the chunked kernels."""
    return list(_table()["default"])


def configuration(kernel: str, device_family: str, heads: int) -> dict[str, int]:
    """Block sizes, warps and stages of a kernel.

    Args:
        kernel: One of ``kernels()``.
        device_family: From ``tiles.family``.
        heads: Value heads.

    Returns:
        The entry ``family:heads``, else the one of ``family``, else the default.
    """
    table = _table()
    for key in (f"{device_family}:{heads}", device_family, "default"):
        if key in table:
            return table[key][kernel]
    raise KeyError(kernel)
