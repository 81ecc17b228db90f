"""Which kernel, tile, warps and stages serve a row count: data, made offline by the benchmark.

Nothing here can change a result except ``parts``, the K partition, and that is a function of the
device family and the weight's shape alone.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch

__all__ = ["Plan", "Tile", "family", "overlap_options", "plan", "processors", "replace"]


@dataclass(frozen=True)
class Tile:
    """One way to launch a GEMM.

    Attributes:
        kernel: ``split``, ``walk``, or ``hopper``: where ``ops.hopper`` cannot serve, a walk of
            this tile does. It alone has a use for the warps and stages. Or ``wide``: a walk with
            tiles of half as many columns again, where descriptors can be had.
        bn: Columns of a tile.
        bm: Rows of a tile.
        warps: Warps of a program.
        stages: Loads in flight.
        bk: Values of k of a step, where the kernel leaves it free.
        swap: The weight is the left operand, where the kernel leaves it free.
        tensor: Operands are loaded by tensor descriptors, where the kernel can.
        persistent: As many programs as the device holds, each walking several tiles.
        left: The rows are the left operand of the matrix unit, as XPU's wants it.
        step: Values of k multiplied at once where ``left``; 0 is a whole group.
        grf: Registers of an XPU thread, 128 or 256; 0 leaves it to the compiler.
        cut: What the programs of ``hopper`` share to be done at the same time: "" nothing,
            ``tiles``, or ``parts``: tiles whose parts are side by side.
        overlap: It may start while the kernel before it ends, where the device can. That saves the
            time of a launch, and costs room while the kernel before it still runs.
        ahead: Values of k, a power of two from 64 on, whose weights a program asks for before it
            waits for the kernel before it, where it may ``overlap``, as the 4-bit argmax always
            may; 0 asks for none.
    """

    kernel: str
    bn: int
    bm: int
    warps: int
    stages: int
    bk: int = 0
    swap: bool = False
    tensor: bool = False
    persistent: bool = False
    left: bool = False
    step: int = 0
    grf: int = 0
    cut: str = ""
    overlap: bool = False
    ahead: int = 0


@dataclass(frozen=True)
class Plan:
    """How one weight is multiplied.

    Attributes:
        parts: The K partition.
        tiles: For row counts up to each bound, the tile; the last serves all above it.
    """

    parts: int
    tiles: tuple[tuple[int, Tile], ...]

    def tile(self, rows: int) -> Tile:
        """The tile for a row count."""
        for bound, tile in self.tiles:
            if rows <= bound:
                return tile
        return self.tiles[-1][1]

    def row_counts(self, most: int) -> list[int]:
        """Both ends of each range of row counts up to ``most`` that a tile serves, ascending: the
        larger ones may not fit the workspace, and are launched otherwise."""
        ends: set[int] = set()
        first = 1
        for bound, _ in self.tiles:
            last = most if bound == self.tiles[-1][0] else min(bound, most)
            if first <= last:
                ends |= {first, last}
            first = last + 1
        return sorted(ends)


def family(device: torch.device) -> str:
    """The device family that tables are keyed by."""
    return _cuda_family(device) if device.type == "cuda" else device.type


@functools.cache
def _cuda_family(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda-sm{major}{minor}"


@functools.cache
def overlap_options(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """PDL and the launch option that goes with it, for a kernel that may start while the one before
    it ends; see ``kernels.overlap``."""
    possible = wanted and device.type == "cuda"
    possible = possible and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if possible else {"PDL": False}


def backend_options(tile: Tile, device: torch.device) -> dict[str, Any]:
    """What a launch passes to the compiler of one kind of device and no other would take."""
    return grf_options(tile.grf, device)


def grf_options(grf: int, device: torch.device) -> dict[str, Any]:
    """Registers of an XPU thread, 128 or 256, for the launcher; 0 leaves them to the compiler."""
    if not grf or device.type != "xpu":
        return {}
    from triton.backends.intel.compiler import XPUOptions

    # triton-xpu 3.3 has other names than later ones, and takes a wrong one without a word.
    names = {128: "small", 256: "large"} if "large" in XPUOptions.grf_mode else {}
    return {"grf_mode": names.get(grf, str(grf))}


@functools.cache
def processors(device: torch.device) -> int:
    """Programs of a persistent launch: the device's multiprocessors, or Xe cores."""
    if device.type == "cpu":
        return 4
    properties = torch.get_device_module(device).get_device_properties(device)
    for name in ("multi_processor_count", "gpu_subslice_count"):
        if hasattr(properties, name):
            return int(getattr(properties, name))
    raise ValueError(f"{device} does not say how many processors it has")


@functools.cache
def _table(op: str) -> dict[str, Any]:
    text = resources.files("vllm_b70.ops").joinpath(f"{op}.tiles.json").read_text()
    table: dict[str, Any] = json.loads(text)
    return table


def _plan(parts: int, entries: list[dict[str, Any]]) -> Plan:
    return Plan(
        parts,
        tuple((t["rows"], Tile(**{k: v for k, v in t.items() if k != "rows"})) for t in entries),
    )


@functools.cache
def plan(op: str, device_family: str, columns: int, depth: int, groups: int) -> Plan:
    """The plan of a weight.

    Args:
        op: Name of the op whose table to read.
        device_family: From ``family``.
        columns: N.
        depth: K.
        groups: Groups along K; no plan has more parts than that.

    Returns:
        The table's plan for this shape; what its entry leaves out comes from the default of the
        family, else that of unknown devices, with parts chosen from the shape.
    """
    table = _table(op)
    shapes = table.get(device_family, table["default"])
    default = shapes.get("default", table["default"]["default"])
    entry = shapes.get(f"{columns}x{depth}", default)
    # Enough programs for a large device at one row, and at least 8 groups for each.
    wanted = -(-256 * 64 // columns)
    parts = entry.get("parts", max(1, min(8, wanted, groups // 8)))
    return _plan(max(1, min(parts, groups)), entry.get("tiles", default["tiles"]))
