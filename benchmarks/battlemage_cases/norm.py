"""The norms of Qwen3.5 9B and 27B, at the launches of ``ops.norm`` for few and for many rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.battlemage_cases.case import Case

#: By columns, rows and warps of a program; a test compares them with ``ops.norm.choose``.
LAUNCHES = {4096: ((1, 8),), 5120: ((1, 16),), 256: ((1, 1), (16, 8)), 128: ((1, 1), (32, 8))}

#: SIZE and REST of the kernel by columns; a test compares them with ``ops.norm.pieces``.
PIECES = {4096: (4096, 0), 5120: (4096, 1024), 256: (256, 0), 128: (128, 0)}


def cases() -> Iterator[Case]:
    for dtype in ("bf16", "fp16"):
        for columns in (4096, 5120):
            yield from _norm(dtype, columns)
            yield from _norm(dtype, columns, RESIDUAL=True)
        yield from _norm(dtype, 256, HEADS=16)
        yield from _norm(dtype, 128, HEADS=32, GATE="silu")
    yield from _norm("bf16", 128, HEADS=32, GATE="sigmoid")
    yield from _norm("bf16", 128, HEADS=16, MEAN=False, WEIGHT=False)


def _norm(dtype: str, columns: int, **changed: Any) -> Iterator[Case]:
    size, rest = PIECES[columns]
    for rows, warps in LAUNCHES[columns]:
        constants: dict[str, Any] = dict(
            COLUMNS=columns, SIZE=size, LEVELS=size.bit_length() - 1, REST=rest, ROWS=rows,
            HEADS=1, MEAN=True, WEIGHT=True, RESIDUAL=False, GATE="none",
            LAST=1, PDL=False,
        )  # fmt: skip
        yield Case(
            kernel="norm.rms_norm",
            dtype=dtype,
            types={
                name: f"*{dtype}" for name in ("x", "residual", "z", "weight", "out", "total_out")
            }
            | {"rows": "i32", "epsilon": "fp32", "offset": "fp32"}
            | {f"{name}_{part}": "i32" for name in "xrz" for part in ("outer", "inner")},
            constants=constants | changed,
            tile={"columns": columns, "rows": rows, "warps": warps, "stages": 2},
            dpas=0,
            unaligned=("rows", "epsilon", "offset"),
        )
