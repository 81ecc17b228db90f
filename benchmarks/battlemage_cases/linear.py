"""The 16-bit GEMM: every tile of the table in both dtypes and without block loads, and the argmax
at the tiles that serve it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.battlemage_cases.case import Case, dot_dpas, xpu_tiles


def cases() -> Iterator[Case]:
    for tile in xpu_tiles("linear"):
        for dtype in ("fp16", "bf16"):
            yield _gemm(tile["kernel"], tile, dtype)
        # An odd number of columns, K no multiple of 16, no bias, one part.
        yield _gemm(tile["kernel"], tile, "fp16", parts=1, BIAS=False, EVEN_K=False, TENSOR=False)
        if tile["bm"] <= 64:  # ops.gemm.ARGMAX_ROWS
            yield _gemm("argmax", tile, "fp16")
    yield Case(
        kernel="linear.best_of",
        dtype="fp32",
        types={"best": "*i64", "value": "*fp32", "index": "*i64", "M": "i32", "tiles": "i32"},
        constants={"BLOCK": 1024},
        tile={"warps": 4, "stages": 2},
        dpas=0,
        unaligned=("M", "tiles"),
    )


def _gemm(kernel: str, tile: dict[str, Any], dtype: str, parts: int = 3, **changed: bool) -> Case:
    constants: dict[str, Any] = dict(
        PARTS=parts, BN=tile["bn"], BM=tile["bm"], BK=tile["bk"],
        SWAP=False, TENSOR=True, BIAS=True, EVEN_K=True,
    )  # fmt: skip
    constants |= changed
    types = dict(x=f"*{dtype}", w=f"*{dtype}", bias=f"*{dtype}", M="i32", N="i32", K="i32")
    if kernel == "argmax":
        types["best"] = "*i64"
        constants["DTYPE"] = dtype
    else:
        types["out"] = f"*{dtype}"
    if kernel == "split":
        types |= {"partial": "*fp32", "done": "*i32"}
    if kernel == "walk":
        constants["FLATTEN"] = tile.get("persistent", False)
    if kernel != "argmax":
        constants |= {"PDL": False, "AHEAD": 0}
        types["weight"] = f"*{dtype}"
    # A walk's first part stands apart from the loop over the others.
    dots = 2 if kernel != "split" and parts > 1 else 1
    return Case(
        kernel=f"linear.{kernel}",
        dtype=dtype,
        types=types,
        constants=constants,
        tile=tile,
        dpas=dots * dot_dpas(tile["bm"], tile["bn"], tile["bk"], tile["warps"]),
        block_loads=bool(constants["TENSOR"]),
        unaligned=("M",) if constants["TENSOR"] else ("M", "N", "K", "x", "w"),
    )
