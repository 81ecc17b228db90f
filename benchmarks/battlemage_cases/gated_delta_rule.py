"""The recurrent kernel of the gated delta net at the launch that an XPU gets."""

from __future__ import annotations

import json
from collections.abc import Iterator

from benchmarks.battlemage_cases.case import OPS, Case

#: Key heads, value heads of 9B and 27B, keys and values of a head.
HK, HEADS, SIZE = 16, (32, 48), 128


def cases() -> Iterator[Case]:
    for dtype, heads in zip(("bf16", "fp16"), HEADS, strict=True):
        yield _case(dtype, heads)
        yield _case("fp16" if dtype == "bf16" else "bf16", heads)


def _case(dtype: str, heads: int) -> Case:
    table = json.loads((OPS / "gdn_launches.json").read_text())
    found = [table[key]["recurrent"] for key in (f"xpu:{heads}", "xpu", "default") if key in table]
    launch = found[0]
    return Case(
        kernel="gated_delta_rule.advance",
        dtype=dtype,
        types={name: f"*{dtype}" for name in ("x", "a", "b", "out")}
        | {name: "*fp32" for name in ("a_log", "dt_bias", "state")}
        | {name: "*i32" for name in ("starts", "read", "table")}
        | {"slot_units": "i32", "columns": "i32"},
        constants=dict(
            X_ROW=2 * HK * SIZE + heads * SIZE, A_ROW=2 * heads, B_ROW=2 * heads, HK=HK, HV=heads,
            K=SIZE, V=SIZE, BV=launch["block"], SCALE=SIZE**-0.5, PDL=False,
        ),
        tile={"block": launch["block"], "warps": launch["warps"], "stages": 2}
        | ({"grf": launch["grf"]} if "grf" in launch else {}),
        dpas=0,
        unaligned=(
            "a", "b", "a_log", "dt_bias", "starts", "read", "table", "slot_units", "columns",
        ),
    )  # fmt: skip
