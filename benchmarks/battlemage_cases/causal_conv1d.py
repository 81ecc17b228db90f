"""The convolution of the gated delta net: rows past their prompt, and prompt chunks."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.battlemage_cases.case import Case
from benchmarks.battlemage_cases.gated_delta_rule import HEADS, HK, SIZE

#: Of ``ops.recurrent_steps`` and ``ops.prompt_inputs``; a test compares them.
CONV_BLOCK, CONV_WARPS = 256, 4
BLOCK_TOKENS, WARPS, GRF, GRID = 16, 4, 256, 64


def cases() -> Iterator[Case]:
    for dtype in ("bf16", "fp16"):
        for heads in HEADS:
            yield _steps(dtype, heads, along=True)
            yield _prompts(dtype, heads, along=True)
    # vLLM can also keep the three inputs of a channel side by side.
    yield _steps("bf16", HEADS[0], along=False)
    yield _prompts("bf16", HEADS[0], along=False)


def _strides(heads: int, along: bool) -> dict[str, int]:
    """X_ROW of q, k, v and z in one projection, and the history's with 3 drafts' inputs."""
    channels = 2 * HK * SIZE + heads * SIZE
    token, channel = (channels, 1) if along else (1, 6)
    return {"X_ROW": channels + heads * SIZE, "TOKEN": token, "CHANNEL": channel}


def _steps(dtype: str, heads: int, along: bool) -> Case:
    return Case(
        kernel="causal_conv1d.steps",
        dtype=dtype,
        types={name: f"*{dtype}" for name in ("x", "weight", "history", "out")}
        | {name: "*i32" for name in ("starts", "read", "table")}
        | {"slot_units": "i32", "columns": "i32"},
        constants=dict(D=2 * HK * SIZE + heads * SIZE, BD=CONV_BLOCK, PDL=False)
        | _strides(heads, along),
        tile={"block": CONV_BLOCK, "warps": CONV_WARPS, "stages": 2},
        dpas=0,
        unaligned=("starts", "read", "table", "slot_units", "columns"),
    )


def _prompts(dtype: str, heads: int, along: bool) -> Case:
    loose = ("a", "b", "a_log", "dt_bias", "sources", "starts", "slots", "resumed", "chunks")
    return Case(
        kernel="causal_conv1d.prompts",
        dtype=dtype,
        types={name: f"*{dtype}" for name in ("x", "a", "b", "weight", "history", "q", "k", "v")}
        | {name: "*fp32" for name in ("a_log", "dt_bias", "decay", "beta")}
        | {name: "*i32" for name in ("sources", "starts", "slots", "resumed", "chunks")}
        | {"slot_units": "i32"},
        constants=dict(
            A_ROW=2 * heads, B_ROW=2 * heads, HK=HK, HV=heads, K=SIZE, V=SIZE, BD=SIZE,
            GRID=GRID, BT=BLOCK_TOKENS,
        )
        | _strides(heads, along),
        tile={"tokens": BLOCK_TOKENS, "warps": WARPS, "stages": 2, "grf": GRF},
        dpas=0,
        unaligned=(*loose, "slot_units"),
    )  # fmt: skip
