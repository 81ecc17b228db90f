"""The INT4 GEMM: every tile of the table in both dtypes, with every group, and masked; and the
argmax at its own tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.battlemage_cases.case import Case, dot_dpas, xpu_tiles


def cases() -> Iterator[Case]:
    for tile in xpu_tiles("int4_linear"):
        for dtype in ("fp16", "bf16"):
            yield _case(tile, dtype)
        for group in (32, 64):
            yield _case(tile, "fp16", group=group)
        # An odd number of columns and a last group that is cut off; symmetric, no bias, one part.
        odd = dict(ASYMMETRIC=False, BIAS=False, EVEN_N=False, EVEN_K=False)
        yield _case(tile, "fp16", parts=1, **odd)
        # What takes the place of block loads where x or K does not allow them.
        yield _case(tile, "fp16", parts=1, **odd, BLOCK=False)
    for tile in xpu_tiles("int4_argmax"):
        for dtype in ("fp16", "bf16"):
            yield _argmax(tile, dtype, EVEN_N=True)
        yield _argmax(tile, "fp16", EVEN_N=False)


def _argmax(tile: dict[str, Any], dtype: str, **changed: bool) -> Case:
    """One part: that is the partition of every vocabulary; x by blocks, as a hidden state is."""
    step = tile["step"] or 128
    return Case(
        kernel="int4_linear.argmax",
        dtype=dtype,
        types=dict(
            x=f"*{dtype}", words="*i32", scale=f"*{dtype}", best="*i64",
            M="i32", N="i32", NP="i32", K="i32", groups="i32",
        ),
        constants=dict(
            PARTS=1, GROUP=128, STEP=step, BN=tile["bn"], BM=tile["bm"], FP16=dtype == "fp16",
            BLOCK=True,
        ) | changed,
        tile=tile,
        dpas=dot_dpas(tile["bm"], tile["bn"], step, tile["warps"]),
        block_loads=True,
        unaligned=("M", "groups") + (() if changed["EVEN_N"] else ("N",)),
    )  # fmt: skip


def _case(
    tile: dict[str, Any], dtype: str, group: int = 128, parts: int = 3, **changed: bool
) -> Case:
    step = min(tile["step"] or group, group)
    constants = dict(
        PARTS=parts, GROUP=group, STEP=step, BN=tile["bn"], BM=tile["bm"], FP16=dtype == "fp16",
        ASYMMETRIC=True, BIAS=True, EVEN_N=True, EVEN_K=True, PTX=False, LEFT=True, BLOCK=True,
        AHEAD=0, PDL=False,
    )  # fmt: skip
    constants |= changed
    types = dict(
        x=f"*{dtype}", words="*i32", scale=f"*{dtype}", offset="*i32", bias=f"*{dtype}",
        partial="*fp32", done="*i32", out=f"*{dtype}",
        M="i32", N="i32", NP="i32", K="i32", groups="i32",
    )  # fmt: skip
    if tile["kernel"] == "walk":
        del types["partial"], types["done"]
    # The walk's first part stands apart from the loop over the others.
    dots = 2 if tile["kernel"] == "walk" and parts > 1 else 1
    return Case(
        kernel=f"int4_linear.{tile['kernel']}",
        dtype=dtype,
        types=types,
        constants=constants,
        tile=tile,
        dpas=dots * dot_dpas(tile["bm"], tile["bn"], step, tile["warps"]),
        block_loads=bool(constants["BLOCK"]),
        unaligned=("M", "groups")
        + (() if constants["EVEN_N"] else ("N",))
        + (() if constants["BLOCK"] else ("x", "K")),
    )
