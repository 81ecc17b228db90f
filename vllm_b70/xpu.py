"""What an XPU and the software around it must have for the exact route, found out by asking it.

The policy refuses to start without, and ``vllm-b70 doctor`` shows what was found. Behaviour is
asked for wherever it can be; a version stands where it cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_b70.compat.versions import version_of

#: Part of the names of the Battlemage cards, for which every kernel is compiled.
BATTLEMAGE = ("B70", "B65", "B60", "B50", "B580", "B570")
#: The oldest triton-xpu that the kernels are compiled with (scripts/battlemage.sh).
TRITON = (3, 3)


@dataclass(frozen=True)
class Need:
    """One thing that the exact route needs.

    Attributes:
        what: A short name.
        met: Whether it is there.
        found: What was found.
        remedy: What to do without it.
    """

    what: str
    met: bool
    found: str
    remedy: str


def needs(cards: int) -> Iterator[Need]:
    """Everything that a server on ``cards`` cards needs; the first that is not met may hide others.

    torch must be importable; vLLM is not imported.
    """
    import torch

    count = torch.xpu.device_count() if torch.xpu.is_available() else 0
    yield Need(
        f"{cards} card{'s' * (cards > 1)}",
        count >= cards,
        f"{count} visible",
        "let ZE_AFFINITY_MASK and ONEAPI_DEVICE_SELECTOR show them, or ask for fewer with "
        "--tensor-parallel-size",
    )
    for index in range(min(count, cards)):
        yield _matrix_unit(index, torch.xpu.get_device_properties(index))
    yield from _triton()
    yield Need(
        "memory information",
        hasattr(torch.ops._C_cache_ops, "getMemoryInfo"),
        f"vllm-xpu-kernels {version_of('vllm-xpu-kernels') or 'not installed'}",
        "install the vllm-xpu-kernels that this vLLM names in its requirements",
    )
    if cards > 1:
        yield Need(
            "communication between cards",
            torch.distributed.is_xccl_available(),
            f"torch {torch.__version__}",
            "install a torch with XCCL (the +xpu builds from 2.8 on), or use one card",
        )


def graphs() -> Need:
    """Whether decode steps can be captured; without, the server runs them one launch at a time."""
    import torch

    return Need(
        "graphs",
        hasattr(torch.xpu, "XPUGraph"),
        f"torch {torch.__version__}",
        "install torch 2.11+xpu or later, or leave cudagraph_mode out",
    )


def int4_gemm() -> Need:
    """Intel's W4A16 kernel, which ``VLLM_B70_LINEAR=native`` calls; vLLM's platform imports it."""
    import torch

    there = hasattr(torch.ops._xpu_C, "int4_gemm_w4a16")
    version = version_of("vllm-xpu-kernels")
    return Need(
        "native INT4 GEMM",
        there,
        f"vllm-xpu-kernels {version or 'not installed'}{'' if there else ', no int4_gemm_w4a16'}",
        "install the vllm-xpu-kernels that this vLLM names in its requirements, or set "
        "VLLM_B70_LINEAR=triton",
    )


def _matrix_unit(index: int, properties: Any) -> Need:
    """Kernels multiply by 16-wide subgroups and load rectangles: what Battlemage has."""
    lacks = [
        name
        for name in ("has_subgroup_matrix_multiply_accumulate", "has_subgroup_2d_block_io")
        if not getattr(properties, name, False)
    ]
    if 16 not in getattr(properties, "sub_group_sizes", ()):
        lacks.append("sub_group_sizes 16")
    return Need(
        f"matrix unit of xpu:{index}",
        not lacks,
        properties.name + (f" without {', '.join(lacks)}" if lacks else ""),
        "use a Battlemage card (Arc Pro B70) and a torch that knows it",
    )


def _triton() -> Iterator[Need]:
    remedy = f"install triton-xpu {'.'.join(map(str, TRITON))} or later, and no other triton"
    try:
        import triton
        from triton.backends import backends
        from triton.backends.intel.compiler import XPUOptions
    except ImportError as error:
        yield Need("Triton for XPU", False, str(error), remedy)
        return
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    active = [n for n, b in backends.items() if n != "cpu" and b.driver.is_active()]
    yield Need(
        "Triton for XPU",
        active == ["intel"] and version >= TRITON,
        f"triton {triton.__version__}, active drivers: {', '.join(active) or 'none'}",
        remedy,
    )
    # A compiler that does not know an option takes it without a word and would fuse.
    yield Need(
        "Triton's enable_fp_fusion",
        hasattr(XPUOptions, "enable_fp_fusion") and hasattr(XPUOptions, "grf_mode"),
        f"triton {triton.__version__}",
        remedy,
    )
