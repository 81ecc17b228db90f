"""What the compiler's text says of a kernel: instructions counted, registers estimated."""

from __future__ import annotations

import re
import struct
from collections import Counter
from typing import Any

_CALL = re.compile(r"call [^@\n]*@\"?([\w.]+)")
_NAME = re.compile(r"%[\w.]+")
_WIDTH = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8}
_FLAGS = {
    "nsw", "nuw", "nneg", "exact", "disjoint", "inbounds", "nusw", "fast", "nnan", "ninf", "nsz",
    "arcp", "contract", "afn", "reassoc", "tail", "volatile", "samesign",
}  # fmt: skip


def count(ttgir: str, llir: str, spirv: bytes) -> dict[str, Any]:
    """Count what matters in one compiled kernel.

    Args:
        ttgir: The tensor program; layouts are chosen in it.
        llir: The LLVM IR of one sub-group's thread.
        spirv: The module.

    Returns:
        ``dpas``, ``block_loads``, ``block_prefetches``, ``barriers`` and of them ``loop_barriers``
        (in a loop), ``conversions`` (changes of layout between threads' registers; not all of them
        cost anything), ``slm_operands`` (dot operands that go through shared memory),
        ``dots_elsewhere`` (dots not made of DPAS), ``fma``, ``may_contract`` (the module does not
        forbid that a multiplication and an addition are fused), ``threads_per_warp`` and
        ``register_bytes`` (most bytes of data, addresses left out, live at once in a sub-group in
        the order of the LLVM IR).
    """
    lines = _body(llir)
    calls: Counter[str] = Counter()
    in_loop = _loop_lines(lines)
    loop_barriers = 0
    for number, line in enumerate(lines):
        if match := _CALL.search(line):
            calls[match[1]] += 1
            loop_barriers += _is_barrier(match[1]) and number in in_loop

    def total(*parts: str) -> int:
        return sum(n for name, n in calls.items() if all(part in name for part in parts))

    width = re.search(r"threads-per-warp\" = (\d+)", ttgir)
    threads = int(width[1]) if width else 16
    dots = re.findall(r"tt\.dot [^\n]*-> tensor<[^\n]*?, (#\w+)>", ttgir)
    dpas = {name for name in re.findall(r"^(#\w+) = #triton_intel_gpu\.dpas", ttgir, re.M)}
    modes, extended = _spirv(spirv)
    return {
        "dpas": total("matrix_mad") + total("SubgroupMatrixMultiplyAccumulate"),
        "block_loads": total("2d_block_read") + total("Subgroup2DBlockLoad"),
        "block_prefetches": total("2d_block_prefetch") + total("Subgroup2DBlockPrefetch"),
        "barriers": sum(n for name, n in calls.items() if _is_barrier(name)),
        "loop_barriers": loop_barriers,
        "conversions": ttgir.count("ttg.convert_layout"),
        "slm_operands": ttgir.count("ttg.local_load"),
        "dots_elsewhere": sum(layout not in dpas for layout in dots),
        "fma": total("llvm.fma") + total("llvm.fmuladd") + extended,
        "may_contract": _multiplies_and_adds(lines) and _CONTRACTION_OFF not in modes,
        "threads_per_warp": threads,
        "register_bytes": _live_bytes(lines) * threads,
    }


def table(kernels: list[dict[str, Any]]) -> str:
    """The report's main columns as text."""
    columns = {
        "kernel": lambda e: e["kernel"],
        "dtype": lambda e: e["dtype"],
        "tile": lambda e: " ".join(f"{v}" for k, v in e["tile"].items() if k != "kernel"),
        "group": lambda e: e["constants"].get("GROUP", ""),
    } | {
        short: lambda e, name=name: e[name]
        for short, name in (
            ("dpas", "dpas"), ("2D", "block_loads"), ("bar", "barriers"), ("loop", "loop_barriers"),
            ("conv", "conversions"), ("slm", "slm_bytes"), ("regs", "register_bytes"),
            ("fma", "fma"), ("spirv", "spirv_bytes"),
        )
    }  # fmt: skip
    rows = [list(columns)] + [[str(get(e)) for get in columns.values()] for e in kernels]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
    )


def _is_barrier(name: str) -> bool:
    return "barrier" in name.lower()


def _body(llir: str) -> list[str]:
    """The lines of the kernel's function; nothing else in the module is executed."""
    start = re.search(r"^define [^\n]*spir_kernel [^\n]*\{\n", llir, re.M)
    if start is None:
        raise ValueError("no kernel in the LLVM IR")
    return llir[start.end() : llir.index("\n}", start.end())].split("\n")


def _blocks(lines: list[str]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Blocks as ranges of lines, and the numbers of the blocks that each may go on to."""
    starts, labels = [0], {"": 0}
    for number, line in enumerate(lines):
        if match := re.match(r"([\w.$-]+):", line):
            labels[match[1]] = len(starts)
            starts.append(number)
    ranges = list(zip(starts, starts[1:] + [len(lines)], strict=True))
    following = [
        [labels[t] for line in lines[a:b] for t in re.findall(r"label %([\w.$-]+)", line)]
        for a, b in ranges
    ]
    return ranges, following


def _loop_lines(lines: list[str]) -> set[int]:
    """Lines inside a loop: those between a block and a later one that jumps back to it."""
    ranges, following = _blocks(lines)
    found: set[int] = set()
    for block, targets in enumerate(following):
        for target in targets:
            if target <= block:
                found.update(range(ranges[target][0], ranges[block][1]))
    return found


_CONTRACTION_OFF = 31


def _spirv(module: bytes) -> tuple[set[int], int]:
    """Execution modes of the entry point, and calls of OpenCL's fma and mad."""
    words = struct.unpack(f"<{len(module) // 4}I", module)
    at, modes, fused = 5, set(), 0
    while at < len(words):
        length, operation = words[at] >> 16, words[at] & 0xFFFF
        if operation == 16:  # OpExecutionMode
            modes.add(words[at + 2])
        elif operation == 12:  # OpExtInst
            fused += words[at + 4] in (26, 42)
        at += length
    return modes, fused


def _multiplies_and_adds(lines: list[str]) -> bool:
    products = {line.split("=")[0].strip() for line in lines if " fmul " in line}
    return any(
        products & set(_NAME.findall(line.split("=", 1)[1]))
        for line in lines
        if " fadd " in line or " fsub " in line
    )


def _live_bytes(lines: list[str]) -> int:
    """Most bytes of values that one thread has to keep at once, by liveness over the blocks."""
    ranges, following = _blocks(lines)
    sizes: dict[str, int] = {}
    code: list[list[tuple[str, list[str]]]] = []
    carried: dict[tuple[int, int], set[str]] = {}
    labels = {0: ""}
    for number, (start, _) in enumerate(ranges[1:], 1):
        labels[number] = lines[start].split(":")[0]
    by_label = {label: number for number, label in labels.items()}
    for number, (start, end) in enumerate(ranges):
        block: list[tuple[str, list[str]]] = []
        for line in lines[start:end]:
            text = re.sub(r"label %[\w.$-]+|, ![^\n]*|;.*", "", line).strip()
            match = re.match(r"(%[\w.]+) = (.*)", text)
            name, rest = (match[1], match[2]) if match else ("", text)
            if name:
                sizes[name] = _size(rest)
            if rest.startswith("phi "):
                for value, label in re.findall(r"\[ ([^,\[\]]+), %([\w.$-]+) \]", rest):
                    if value.startswith("%"):
                        source = by_label.get(label, 0)
                        carried.setdefault((source, number), set()).add(value)
                block.append((name, []))
            else:
                block.append((name, _NAME.findall(rest)))
        code.append(block)
    live_in: list[set[str]] = [set() for _ in code]
    most, changed = 0, True
    while changed:
        changed, most = False, 0
        for number in reversed(range(len(code))):
            live = set()
            for target in following[number]:
                live |= live_in[target] | carried.get((number, target), set())
            bytes_live = sum(sizes.get(v, 0) for v in live)
            most = max(most, bytes_live)
            for name, used in reversed(code[number]):
                if name in live:
                    live.discard(name)
                    bytes_live -= sizes[name]
                for value in used:
                    if value in sizes and value not in live:
                        live.add(value)
                        bytes_live += sizes[value]
                most = max(most, bytes_live)
            if live != live_in[number]:
                live_in[number], changed = live, True
    return most


def _size(text: str) -> int:
    """Bytes of an instruction's result; constants of the address space are counted as well."""
    words = text.split()
    while words and words[0] in _FLAGS:
        words.pop(0)
    operation, rest = words[0], " ".join(w for w in words[1:] if w not in _FLAGS)
    if operation == "alloca":
        return 0  # an array that the next pass makes registers of; its load is counted
    if operation in ("icmp", "fcmp"):
        return 1
    if operation == "getelementptr" or rest.endswith(" to i64"):
        return 0  # an address, which the next compiler makes anew where that is cheaper
    if operation == "insertelement":
        return _type(rest)
    if operation == "extractelement":
        element = re.match(r"<\d+ x ([^>]+)>", rest)
        return _type(element[1]) if element else 4
    if operation == "shufflevector":
        mask = rest.rsplit("<", 1)[1] if rest.endswith(">") else ""
        # Elements of the mask that are poison hold nothing: wide vectors are made one by one.
        kept = mask.count("i32 ") - mask.count("poison") - mask.count("undef")
        masks = re.findall(r"<(\d+) x i32>", rest)
        element = re.match(r"<\d+ x ([^>]+)>", rest)
        return (kept if mask else int(masks[-1])) * (_type(element[1]) if element else 4)
    if operation == "select":
        return _type(rest.split(", ", 1)[1])
    if " to " in rest and operation.endswith(("ext", "trunc", "cast", "si", "ui", "fp", "ptr")):
        return _type(rest.rsplit(" to ", 1)[1])
    if operation in ("fpext", "sitofp", "uitofp", "fptosi", "fptoui", "ptrtoint", "inttoptr"):
        return _type(rest.rsplit(" to ", 1)[1])
    if operation == "call":
        return _type(re.sub(r"^(spir_func|noundef|zeroext|signext|range\([^)]*\)|\s)+", "", rest))
    if operation == "extractvalue":
        return 4
    return _type(rest)


def _type(text: str) -> int:
    vector = re.match(r"<(\d+) x (\w+)>", text)
    if vector:
        return int(vector[1]) * _type(vector[2])
    array = re.match(r"\[(\d+) x (\w+)\]", text)
    if array:
        return int(array[1]) * _type(array[2])
    name = re.match(r"\w+", text)
    if name is None:
        return 4
    if name[0] in _WIDTH:
        return _WIDTH[name[0]]
    bits = re.fullmatch(r"i(\d+)", name[0])
    return max(1, int(bits[1]) // 8) if bits else 4
