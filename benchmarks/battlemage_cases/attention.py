"""Attention: every launch of ``ops.attention`` for an XPU, at heads of 256 in groups of 4 and 6."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.battlemage_cases.case import Case, dot_dpas

#: Of ``ops.attention.plan(256, ..., "xpu")``; a test compares them, because it needs torch.
SIZE, PART, TILE, LIMIT = 256, 256, 32, 128
SPLITS = (
    {"rows": 16, "warps": 4, "stages": 3, "grf": 256},
    {"rows": 32, "warps": 4, "stages": 3, "grf": 256},
)
WALK = {"rows": 128, "warps": 16, "stages": 3, "grf": 256}
MERGE = {"warps": 4, "stages": 2}
#: What vLLM makes of 9B's and 27B's blocks, and one that is smaller than a part.
BLOCK, SMALL_BLOCK = 528, 64
HEADS, SEQUENCES = 4, 128


def cases() -> Iterator[Case]:
    for dtype, group in (("bf16", 4), ("fp16", 6)):
        for tile in SPLITS:
            yield _tiled("split", tile, dtype, group, BLOCK)
        yield _tiled("walk", WALK, dtype, group, BLOCK)
        # Few rows on a large card take the columns of a head in pieces.
        for columns in (SIZE, 64):
            yield _merge(dtype, group, columns)
    yield _tiled("split", SPLITS[0], "bf16", 4, SMALL_BLOCK)
    yield _tiled("walk", WALK, "bf16", 4, SMALL_BLOCK)


def _tiled(kernel: str, tile: dict[str, Any], dtype: str, group: int, block: int) -> Case:
    types = (
        {name: f"*{dtype}" for name in ("q", "k", "v", "out")}
        | {name: "*i32" for name in ("table", "starts", "lengths")}
        | {"scale": "fp32", "sequences": "i32"}
        | {f"{name}_stride": "i32" for name in ("q", "out", "table", "block", "slot", "head")}
    )
    if kernel == "split":
        types |= {name: "*fp32" for name in ("work_m", "work_total", "work_acc")}
        types["capacity"] = "i32"
    # Rows are dealt out to the warps by eights, as in any chain of dots, and none has columns of
    # its own: with more warps than eights, several compute the same.
    eights = 8 * max(1, tile["rows"] // 8 // tile["warps"])
    scores, values = dot_dpas(eights, TILE, SIZE, 1), dot_dpas(eights, SIZE, TILE, 1)
    each = scores + values + dot_dpas(eights, 16, TILE, 1)
    # Whole tiles, and tiles that not every row sees; split looks for infinities in the latter.
    dpas = 2 * each + (values if kernel == "split" else 0)
    return Case(
        kernel=f"attention.{kernel}",
        dtype=dtype,
        types=types,
        constants=dict(
            HEADS=HEADS, GROUP=group, D=SIZE, BLOCK=block, PART=PART, TILE=TILE,
            ROWS=tile["rows"], LIMIT=LIMIT, SEQUENCES=SEQUENCES,
        ),
        tile=tile,
        dpas=dpas,
        unaligned=tuple({"sequences", "capacity", "table_stride", "scale"} & types.keys()),
        # No launch fits: 8 rows of 256 columns of two accumulators and the queries take 20 KiB, and
        # a tile of keys, which every warp multiplies whole, 16 KiB where it is read at once.
        registers=False,
    )  # fmt: skip


def _merge(dtype: str, group: int, columns: int) -> Case:
    return Case(
        kernel="attention.merge",
        dtype=dtype,
        types={"starts": "*i32", "lengths": "*i32", "out": f"*{dtype}"}
        | {name: "*fp32" for name in ("work_m", "work_total", "work_acc")}
        | {name: "i32" for name in ("sequences", "capacity", "out_stride")},
        constants=dict(
            HEADS=HEADS, GROUP=group, GROUP_ROWS=1 << (group - 1).bit_length(), D=SIZE,
            COLUMNS=columns, PART=PART, LIMIT=LIMIT, SEQUENCES=SEQUENCES, STAGES=4,
        ),
        tile=MERGE,
        dpas=0,
        unaligned=("sequences", "capacity"),
    )  # fmt: skip
