"""One compilation, declared; and the tile tables as the cases read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPS = Path(__file__).resolve().parent.parent.parent / "vllm_b70" / "ops"


@dataclass(frozen=True)
class Case:
    """A kernel with its arguments' types and its constants.

    Attributes:
        kernel: ``file.function`` in ``vllm_b70/kernels``, or ``vllm.file.function``: one of
            vLLM's chunked kernels.
        dtype: What the report calls this case; ``fp16`` or ``bf16`` for most kernels.
        types: Triton type of each run-time argument, e.g. ``*fp16`` or ``i32``.
        constants: Value of each constexpr argument.
        tile: ``warps``, ``stages``, optionally ``grf`` (128 or 256), and whatever names the tile.
        dpas: DPAS instructions of one sub-group that the dots must make; ``dot_dpas`` counts them.
        block_loads: The kernel asks for 2D block loads, so there must be some.
        unaligned: Run-time arguments that are not known to be multiples of 16 (those that the
            kernel's decorator names in ``do_not_specialize``, and any that need not be).
        registers: The estimate of registers has to fit; False where no launch fits, and the
            case says why.
        fusion: A multiplication and an addition may be fused.
        plain_dots: Dots of float32 that are not to be rounded: chains of fused multiply-adds, in
            ascending k, instead of DPAS.
    """

    kernel: str
    dtype: str
    types: dict[str, str]
    constants: dict[str, Any]
    tile: dict[str, Any]
    dpas: int
    block_loads: bool = False
    unaligned: tuple[str, ...] = ()
    registers: bool = True
    fusion: bool = False
    plain_dots: int = 0


def dot_dpas(m: int, n: int, k: int, warps: int) -> int:
    """DPAS instructions of one sub-group for a 16-bit dot of [m, k] and [k, n]: each does 8 x 16
    results and 16 products of each. Where there are fewer such pieces than warps, several warps
    compute the same one."""
    return max(1, -(-m // 8) * -(-n // 16) // warps) * (k // 16)


def xpu_tiles(op: str) -> list[dict[str, Any]]:
    """The tiles that the op's table has for an XPU, each once, without their row counts."""
    found: list[dict[str, Any]] = []
    for entry in json.loads((OPS / f"{op}.tiles.json").read_text())["xpu"].values():
        for tile in entry.get("tiles", []):
            bare = {name: value for name, value in tile.items() if name != "rows"}
            if bare not in found:
                found.append(bare)
    return found
