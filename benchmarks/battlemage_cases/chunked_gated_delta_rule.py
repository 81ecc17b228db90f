"""vLLM's chunked kernels of the gated delta net, as prompt chunks run through them on an XPU.

``chunk_fwd_kernel_o`` does not fit: of its configurations none needs fewer registers than this one,
whose estimate is 4 % over what 256 registers hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.battlemage_cases.case import OPS, Case, dot_dpas
from benchmarks.battlemage_cases.gated_delta_rule import HEADS, HK, SIZE

GRID = 64


def cases() -> Iterator[Case]:
    for dtype, heads in zip(("bf16", "fp16"), HEADS, strict=True):
        yield from _cases(dtype, heads)


def _cases(dtype: str, heads: int) -> Iterator[Case]:
    x, shape = f"*{dtype}", {"H": heads, "BT": GRID, "IS_VARLEN": True}
    wide = shape | {"Hg": HK, "K": SIZE}
    gate = {"beta": "*fp32", "g": "*fp32"}

    yield _case(
        "cumsum.chunk_local_cumsum_scalar_kernel", dtype, {"s": "*fp32", "o": "*fp32"},
        shape | {"B": 1, "REVERSE": False, "HEAD_FIRST": False}, lambda tile: 0,
    )  # fmt: skip
    # Of float32, as tf32: eight products an instruction.
    yield _case(
        "chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd_kernel", dtype,
        {"k": x, "A": "*fp32"} | gate, wide | {"USE_G": True, "CAST_DOT_TO_K_DTYPE": False},
        lambda tile: dot_dpas(GRID, GRID, 2 * tile["BK"], tile["warps"]),
    )  # fmt: skip
    yield _case(
        "solve_tril.merge_16x16_to_64x64_inverse_kernel", dtype, {"A": "*fp32", "Ai": x},
        shape | {"USE_TMA": False, "DOT_PRECISION": "ieee"}, lambda tile: 0, plain_dots=16,
    )  # fmt: skip
    yield _case(
        "wy_fast.recompute_w_u_fwd_kernel", dtype,
        {name: x for name in ("k", "v", "w", "u", "A")} | gate,
        wide | {"V": SIZE, "BK": 64, "BV": 64},
        lambda tile: 2 * dot_dpas(GRID, 64, GRID, tile["warps"]),
    )  # fmt: skip
    yield _case(
        "chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64", dtype,
        {name: x for name in ("k", "v", "w", "v_new", "h")}
        | {name: "*fp32" for name in ("g", "h0", "ht")},
        wide | {"V": SIZE, "gk": None, "USE_G": True, "USE_GK": False, "USE_INITIAL_STATE": True,
                "STORE_FINAL_STATE": True, "SAVE_NEW_VALUE": True, "USE_EXP2": False},
        lambda tile: 4 * dot_dpas(GRID, tile["BV"], 64, tile["warps"]), chunks="chunk_offsets",
    )  # fmt: skip
    yield _case(
        "chunk_o.chunk_fwd_kernel_o", dtype,
        {name: x for name in ("q", "k", "v", "h", "o")} | {"g": "*fp32", "scale": "fp32"},
        wide | {"V": SIZE, "USE_G": True},
        lambda tile: dot_dpas(GRID, tile["BV"], tile["BK"], tile["warps"])
        + dot_dpas(GRID, GRID, tile["BK"], tile["warps"])
        + dot_dpas(GRID, tile["BV"], GRID, tile["warps"]),
        registers=False,
    )  # fmt: skip


def _case(
    kernel: str,
    dtype: str,
    types: dict[str, str],
    constants: dict[str, Any],
    dpas: Callable[[dict[str, Any]], int],
    chunks: str = "chunk_indices",
    **more: Any,
) -> Case:
    name, heads = kernel.split(".")[1], constants["H"]
    table = json.loads((OPS / "gdn_launches.json").read_text())
    keys = (f"xpu:{heads}", "xpu", "default")
    launch = next(table[key][name] for key in keys if name in table.get(key, {}))
    tile = {short.removeprefix("num_"): value for short, value in launch.items()}
    return Case(
        kernel=f"vllm.{kernel}",
        dtype=dtype,
        types=types | {"cu_seqlens": "*i32", chunks: "*i32", "T": "i32"},
        constants=constants | {size: tile[size] for size in ("BK", "BV") if size in tile},
        tile=tile,
        dpas=dpas(tile),
        unaligned=("cu_seqlens", chunks, "T", "scale"),
        **more,
    )
