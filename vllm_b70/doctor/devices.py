"""The devices, and on an XPU what they and their drivers must have."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

from vllm_b70.doctor.finding import Finding, Severity

GIB = 2**30


def kind() -> str:
    """``xpu``, ``cuda`` or ``cpu``: what torch finds first; ``cpu`` without torch."""
    try:
        import torch
    except ImportError:
        return "cpu"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_memory(device: str) -> list[tuple[int, int]]:
    """Free and total bytes of each visible device; of the host for ``cpu``."""
    if device == "cpu":
        pages = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PHYS_PAGES")
        size = os.sysconf("SC_PAGE_SIZE")
        return [(pages[0] * size, pages[1] * size)]
    import torch

    module = torch.get_device_module(device)
    return [module.mem_get_info(index) for index in range(module.device_count())]


def check(cards: int) -> Iterator[Finding]:
    """Every device, and whether the exact route can run on ``cards`` of them."""

    def found(what: str, severity: Severity, text: str, remedy: str = "") -> Finding:
        return Finding("devices", what, severity, text, remedy)

    device = kind()
    memory = free_memory(device)
    if device == "cpu":
        size = f"{memory[0][1] / GIB:.0f} GiB, {memory[0][0] / GIB:.0f} GiB free"
        yield found("cpu", Severity.ok, f"{os.cpu_count()} cores, {size}")
        yield found(
            "cards",
            Severity.note,
            "torch finds none, so nothing was asked of one",
            "for an XPU: install vLLM's XPU build with its torch, and see the driver below",
        )
    else:
        yield from _cards(device, memory)
    if device == "xpu":
        yield from _needs(cards)
    yield from _intel_driver()


def _cards(device: str, memory: list[tuple[int, int]]) -> Iterator[Finding]:
    import torch

    from vllm_b70.xpu import BATTLEMAGE

    names = set()
    for index, (free, total) in enumerate(memory):
        properties = torch.get_device_module(device).get_device_properties(index)
        names.add(properties.name)
        driver = (
            f"driver {properties.driver_version}"
            if device == "xpu"
            else f"torch for CUDA {torch.version.cuda}"
        )
        known = device == "cuda" or any(card in properties.name for card in BATTLEMAGE)
        yield Finding(
            "devices",
            f"{device}:{index}",
            Severity.ok if known else Severity.warning,
            f"{properties.name}, {total / GIB:.0f} GiB, {free / GIB:.0f} GiB free, {driver}",
            "" if known else "kernels are compiled for Battlemage; compare with `vllm-b70 verify`",
        )
    if len(names) > 1:
        yield Finding(
            "devices",
            "cards alike",
            Severity.warning,
            " and ".join(sorted(names)),
            "use cards of one kind for tensor parallelism",
        )


def _needs(cards: int) -> Iterator[Finding]:
    from vllm_b70 import xpu

    with contextlib.suppress(ImportError):
        importlib.import_module("vllm_xpu_kernels._C")
    for need in xpu.needs(cards):
        severity = Severity.ok if need.met else Severity.error
        yield Finding("devices", need.what, severity, need.found, "" if need.met else need.remedy)
    graphs = xpu.graphs()
    yield Finding(
        "devices",
        graphs.what,
        Severity.ok if graphs.met else Severity.warning,
        graphs.found + ("" if graphs.met else "; decodes run without, one launch at a time"),
        "" if graphs.met else graphs.remedy,
    )


def _intel_driver() -> Iterator[Finding]:
    """The kernel's driver, the render nodes and the level-zero loader: why there may be no card."""

    def found(what: str, present: bool, text: str, remedy: str) -> Finding:
        severity = Severity.ok if present else Severity.note
        return Finding("devices", what, severity, text, "" if present else remedy)

    drivers = [name for name in ("xe", "i915") if Path("/sys/bus/pci/drivers", name).exists()]
    yield found(
        "Intel kernel driver",
        bool(drivers),
        ", ".join(drivers) or "none",
        "a B70 needs the xe driver of a recent Linux kernel",
    )
    nodes = sorted(Path("/dev/dri").glob("renderD*"))
    usable = [node for node in nodes if os.access(node, os.R_OK | os.W_OK)]
    yield found(
        "render nodes",
        bool(usable),
        f"{len(nodes)}, of which this user may use {len(usable)}",
        "add the user to the group render; give a container --device /dev/dri",
    )
    loader = ctypes.util.find_library("ze_loader")
    yield found(
        "level-zero loader",
        loader is not None,
        loader or "not found",
        "install libze1 and the Intel compute runtime (intel-opencl-icd, libze-intel-gpu1)",
    )
