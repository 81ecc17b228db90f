"""The Hopper kernel compiled to machine code, and what is wrong with that; no GPU is needed.

    python benchmarks/hopper.py     # needs torch and a Triton that ``ops.hopper`` knows

For each variant: registers, spills, spills in the loops over groups, matrix instructions, fused
multiply-adds, and hazards: between the issue of a matrix instruction and the wait that covers it
nothing may write the registers of its weight, or read or write those of its sum.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vllm_b70.ops import hopper  # noqa: E402

#: Instructions whose first operand is not a register that they write.
WRITE_NOTHING = ("ST", "BAR", "SYNCS", "UTMA", "BRA", "R2UR")


@dataclass(frozen=True)
class Case:
    """One compilation.

    Attributes:
        bm: Rows of the tile.
        parts: The K partition.
        dtype: ``fp16`` or ``bf16``.
        full: With zero points, bias, and a last tile that is cut off; else without.
        aligned: N is known to be a multiple of 16.
        cut: What programs share, as ``Tile.cut`` has it.
    """

    bm: int
    parts: int
    dtype: str
    full: bool = False
    aligned: bool = True
    cut: str = ""


def cases() -> Iterator[Case]:
    """All variants that differ in their code."""
    for bm in hopper.BM:
        for parts in (1, 2, 8):
            yield Case(bm, parts, "fp16")
        for dtype in ("fp16", "bf16"):
            yield Case(bm, 3, dtype, full=True, aligned=dtype == "fp16")
            for cut in ("tiles", "parts"):
                yield Case(bm, 8, dtype, full=dtype == "bf16", cut=cut)
        yield Case(bm, 2, "bf16")


def compile_case(case: Case) -> Any:
    """Compile as a launch would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from vllm_b70.kernels.int4_linear_hopper import walk

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pointer = f"*{case.dtype}"
    types = {
        "x_at": f"tensordesc<{case.dtype}[{case.bm}, 128],{layout!r}>",
        "words": "*i32", "scale": pointer, "offset": "*i32", "bias": pointer, "out": pointer,
        "state": "*fp32", "done": "*i32", "M": "i32", "N": "i32", "NP": "i32", "groups": "i32",
        "row_tiles": "i32", "column_tiles": "i32", "strided": "i32", "zero": "i32",
    }  # fmt: skip
    constants = {
        "PARTS": case.parts, "CUT": case.cut, "BM": case.bm, "STAGES": hopper.stages(case.bm),
        "FP16": case.dtype == "fp16", "ASYMMETRIC": case.full, "BIAS": case.full,
        "EVEN_N": not case.full, "PDL": True,
    }  # fmt: skip
    aligned = ["words", "scale", "offset", "bias", "state", "done", "out", "NP"]
    aligned += ["N"] * case.aligned
    place = walk.arg_names.index
    source = GluonASTSource(
        fn=walk,
        signature={name: types.get(name, "constexpr") for name in walk.arg_names},
        constexprs={(place(name),): value for name, value in constants.items()},
        attrs={(place(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = dict(enable_fp_fusion=False, num_warps=4)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _tool(path: str | Path, content: bytes, *arguments: str) -> str:
    """What a tool prints about a file with this content."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        done = subprocess.run(
            [path, *arguments, file.name], capture_output=True, text=True, check=True
        )
    return done.stdout + done.stderr


def parse(sass: str) -> tuple[list[str], dict[str, int]]:
    """Instructions in order, and the index of the instruction that each label stands before."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(re.sub(r"^@!?U?P\w+\s+", "", found.group(1)))
        elif found := re.match(r"(\.L_x_\d+):", line):
            labels[found.group(1)] = len(code)
    return code, labels


def loops(code: list[str], labels: dict[str, int]) -> list[list[str]]:
    """The innermost loops with matrix instructions: those over groups."""
    found = []
    for i, text in enumerate(code):
        jump = re.search(r"^BRA .*`\((\.L_x_\d+)\)", text)
        if jump and (at := labels.get(jump.group(1), i + 1)) <= i:
            if any("HGMMA" in t for t in code[at : i + 1]):
                found.append((i - at, at, i))
    # Not those around an inner one, nor a wait's second attempts, whose code the compiler moves to
    # the end.
    inner: list[tuple[int, int]] = []
    for _, a, b in sorted(found):
        if not any(a <= y and x <= b for x, y in inner):
            inner.append((a, b))
    return [code[a : b + 1] for a, b in inner]


def _registers(operands: str, width: int) -> set[int]:
    """Registers that operands name; an address has two, whatever lies there."""
    addresses = "".join(re.findall(r"\[.*?\]", operands))
    values = re.sub(r"\[.*?\]", "", operands)
    return {
        int(m[1]) + i
        for text, count in ((addresses, 2), (values, width))
        for m in re.finditer(r"\bR(\d+)", text)
        for i in range(count)
    }


def hazards(code: list[str]) -> list[str]:
    """Register hazards of matrix instructions, in one pass over the code in the order of addresses:
    the kernel has none in flight where a loop closes."""
    found = []
    flying: list[tuple[set[int], set[int]]] = []  # of each committed chain: weights, sums
    weights: set[int] = set()
    sums: set[int] = set()
    for text in code:
        op, _, rest = text.partition(" ")
        if op.startswith("HGMMA"):
            shape, operands = re.match(r"HGMMA\.64x(\d+)x", op), re.match(r"R(\d+), R(\d+),", rest)
            if shape is None or operands is None:
                found.append("weight not in registers: " + text)
                continue
            d, a = map(int, operands.groups())
            target, weight = set(range(d, d + int(shape[1]) // 2)), set(range(a, a + 4))
            if any(s & (target | weight) for _, s in flying):
                found.append("sum in flight: " + text)
            if any(w & target for w, _ in [*flying, (weights, sums)]):
                found.append("weight in flight: " + text)
            weights |= weight
            sums |= target
            if "gsb0" in rest:
                flying.append((weights, sums))
                weights, sums = set(), set()
            continue
        if op.startswith("WARPGROUP.DEPBAR"):
            left = re.search(r"0x([0-9a-f]+)", rest)
            keep = int(left[1], 16) if left else 0
            flying = flying[len(flying) - keep :] if keep else []
            continue
        if not (flying or weights):
            continue
        if op.startswith(("RET", "EXIT")) or op.startswith("BRA"):
            found.append("control flow beside a chain: " + text)
        width = 4 if ".128" in op else 2 if ".64" in op or "WIDE" in op else 1
        first, _, others = rest.partition(",")
        silent = op.startswith(WRITE_NOTHING)
        writes = set() if silent else _registers(first, width)
        reads = _registers(rest if silent else others, width)
        for w, s in [*flying, (weights, sums)]:
            if writes & (w | s):
                found.append("overwritten in flight: " + text)
            if reads & s:
                found.append("sum read in flight: " + text)
    return found


def report(case: Case) -> dict[str, Any]:
    """Compile a case and count."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    kernel = compile_case(case)
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    code, labels = parse(_tool(disassembler, kernel.asm["cubin"], "-c"))
    log = _tool(
        get_ptxas(90).path, kernel.asm["ptx"].encode(), "-v", "--fmad=false", "--gpu-name=sm_90a",
        "-o", "/dev/null",
    )  # fmt: skip
    inner = loops(code, labels)
    return {
        "hazards": hazards(code),
        "hgmma": sum("HGMMA" in t for t in code),
        "loops": [sum("HGMMA" in t for t in loop) for loop in inner],
        "instructions": [len(loop) for loop in inner],
        "spills": int(re.findall(r"(\d+) bytes spill stores", log)[0]),
        "loop_spills": max(sum(t.startswith(("LDL", "STL")) for t in loop) for loop in inner),
        "ffma": sum("FFMA" in t for t in code),
        "hmma": sum(t.startswith("HMMA") for t in code),
        "serialised": log.count("C7510"),
        "registers": int(re.findall(r"Used (\d+) registers", log)[0]),
        "shared": kernel.metadata.shared,
    }


def complaints(found: dict[str, Any], cut: str = "") -> list[str]:
    """What is wrong with a compiled case, in sentences; empty if nothing. Where tiles are shared
    spills are not wrong, outside the loops over groups."""
    wrong = list(found["hazards"])
    # Eight in the loop of each warp group.
    if found["loops"] != [8, 8] or found["hgmma"] != 16:
        wrong.append(f"{found['hgmma']} matrix instructions, in loops {found['loops']}")
    for name in ("spills", "ffma", "hmma", "serialised"):
        if found[name] and not (cut and name == "spills"):
            wrong.append(f"{name}: {found[name]}")
    # One address read back from local memory is hidden by the chain; Triton 3.9 makes such a load.
    if found["loop_spills"] > 1:
        wrong.append(f"{found['loop_spills']} accesses to local memory in a loop")
    if found["registers"] > 168:
        wrong.append(f"{found['registers']} registers: 12 warps do not start")
    if found["shared"] > hopper.SHARED + 1024:
        wrong.append(f"{found['shared']} bytes of shared memory")
    return wrong


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--few", action="store_true", help="of each tile those that differ most")
    few = parser.parse_args().few
    failed = 0
    for case in cases():
        if few and not (
            case.full and (case.cut or not case.aligned) or case == Case(case.bm, 2, "fp16")
        ):
            continue
        found = report(case)
        wrong = complaints(found, case.cut)
        failed += bool(wrong)
        print(case, {k: v for k, v in found.items() if k != "hazards"}, *wrong, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
