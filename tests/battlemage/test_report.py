"""What the compiler makes of the kernels for a Battlemage card: the kept report is about these
sources, finds nothing wrong, and says what the compiler makes of them now."""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import battlemage, battlemage_ir, battlemage_vllm  # noqa: E402
from benchmarks.battlemage_cases.case import dot_dpas, xpu_tiles  # noqa: E402
from vllm_b70.ops import gdn_launches  # noqa: E402

REPORT = json.loads(battlemage.REPORT.read_text())
AGAIN = f"write it again: {battlemage.COMMAND}"


def test_it_was_made_from_these_sources():
    assert REPORT["sources"] == battlemage.sources(), AGAIN


def test_vllms_kernels_are_those_of_the_installed_vllm():
    pytest.importorskip("vllm")
    assert REPORT["vllm_sources"] == battlemage_vllm.sources(), AGAIN


def test_every_launched_kernel_is_in_it():
    missing = battlemage.entry_kernels() - {entry["kernel"] for entry in REPORT["kernels"]}
    assert not missing, f"declare them in benchmarks/battlemage_cases, then {AGAIN}"
    vllms = [e["kernel"] for e in REPORT["kernels"] if e["kernel"].startswith("vllm.")]
    assert {name.split(".")[2] for name in vllms} == set(gdn_launches.chunk_kernels())


def test_every_declared_case_is_in_it():
    declared = [(c.kernel, c.dtype, c.tile, c.constants) for c in battlemage.cases()]
    kept = [(e["kernel"], e["dtype"], e["tile"], e["constants"]) for e in REPORT["kernels"]]
    assert kept == declared, AGAIN


@pytest.mark.parametrize(
    "path", sorted(p.name for p in (ROOT / "vllm_b70/ops").glob("*.tiles.json"))
)
def test_every_xpu_tile_is_in_it(path):
    op = path.removesuffix(".tiles.json")
    if "xpu" in json.loads((ROOT / "vllm_b70/ops" / path).read_text()):
        compiled = [entry["tile"] for entry in REPORT["kernels"]]
        assert [t for t in xpu_tiles(op) if t not in compiled] == []


def test_kernels_for_cuda_alone_are_out_of_an_xpus_reach():
    """The declared exceptions exist, are imported by no other kernel, and no tile leads there."""
    folder = ROOT / "vllm_b70" / "kernels"
    for name in battlemage.CUDA_ONLY:
        assert (folder / f"{name}.py").exists()
        others = [p for p in folder.glob("*.py") if p.stem not in battlemage.CUDA_ONLY]
        assert [p.name for p in others if name in p.read_text()] == []
    for path in (ROOT / "vllm_b70" / "ops").glob("*.tiles.json"):
        for family, shapes in json.loads(path.read_text()).items():
            kernels = {t["kernel"] for entry in shapes.values() for t in entry.get("tiles", [])}
            assert not kernels & {"hopper", "wide"} or family == "cuda-sm90", (
                f"{path.name} {family}"
            )


def test_nothing_is_wrong_with_any_kernel():
    assert [line for e in REPORT["kernels"] for line in battlemage.complaints(e)] == []


def test_a_fresh_compilation_makes_the_same():
    path = os.environ.get("BATTLEMAGE_FRESH", "")
    if not path or not Path(path).exists():
        pytest.skip("no fresh compilation: scripts/test.sh makes one if triton-xpu installs")
    fresh = json.loads(Path(path).read_text())
    assert fresh["versions"]["triton-xpu"] == REPORT["versions"]["triton-xpu"]
    for now, kept in zip(fresh["kernels"], REPORT["kernels"], strict=True):
        assert now == kept, AGAIN


GOOD = {
    "kernel": "k.k", "dtype": "fp16", "tile": {"warps": 32, "grf": 256}, "expected_dpas": 4,
    "dpas": 4, "dots_elsewhere": 0, "wants_block_loads": True, "block_loads": 1, "fma": 0,
    "may_contract": False, "fusion_allowed": False, "slm_bytes": 2**17, "threads_per_warp": 16,
    "limits_registers": True, "register_bytes": 2**14, "plain_dots": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dpas", 3), ("dots_elsewhere", 1), ("block_loads", 0), ("fma", 1), ("may_contract", True),
        ("slm_bytes", 2**17 + 1), ("threads_per_warp", 64), ("register_bytes", 2**14 + 1),
        ("tile", {"warps": 64, "grf": 256}), ("tile", {"warps": 32}), ("plain_dots", 1),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(name, value):
    """Were it not, a report without complaints would show nothing."""
    assert battlemage.complaints(GOOD) == []
    assert len(battlemage.complaints(GOOD | {name: value})) == 1


def test_launched_kernels_are_those_that_no_kernel_calls(tmp_path):
    folder = tmp_path / "vllm_b70" / "kernels"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text(
        "@triton.jit\ndef helper(): ...\n"
        "@triton.jit(do_not_specialize=['M'])\ndef first(): b.other(); helper()\n"
        "def host(): first()\n"
    )
    (folder / "b.py").write_text("@triton.jit\ndef other(): ...\n@gluon.jit\ndef second(): ...\n")
    for name in battlemage.CUDA_ONLY:
        (folder / f"{name}.py").write_text("@gluon.jit\ndef third(): ...\n")
    assert battlemage.entry_kernels(tmp_path) == {"a.first", "b.second"}


LLIR = """define spir_func void @_Z7barrierj(i32)
define spir_kernel void @k(ptr addrspace(1) %0, float %1) {
  %2 = load <8 x float>, ptr addrspace(1) %0
  br label %3
3:                                                ; preds = %3, %0
  %4 = phi <8 x float> [ %2, %0 ], [ %6, %3 ]
  call spir_func void @_Z7barrierj(i32 1)
  %5 = call spir_func <8 x float> @"_Z38intel_sub_group_f16_f16_matrix_mad_k16"(<8 x float> %4)
  %6 = fadd <8 x float> %5, %2
  %7 = icmp eq i32 0, 0
  br i1 %7, label %8, label %3
8:
  call spir_func void @_Z7barrierj(i32 1)
  call spir_func void @_Z41intel_sub_group_2d_block_read_16b_8r16x2c(ptr %0)
  store <8 x float> %6, ptr addrspace(1) %0
  ret void
}
"""
HEAD = [0x07230203, 0x10400, 0, 100, 0]


def module(*words):
    return b"".join(word.to_bytes(4, "little") for word in [*HEAD, *words])


def test_instructions_are_counted():
    counts = battlemage_ir.count('"ttg.threads-per-warp" = 16 : i32', LLIR, module())
    assert (counts["dpas"], counts["block_loads"]) == (1, 1)
    assert (counts["barriers"], counts["loop_barriers"]) == (2, 1)
    # Two vectors of 32 bytes in each of 16 threads, and the loop's condition.
    assert counts["register_bytes"] == 16 * (2 * 32 + 1)
    assert not counts["may_contract"], "no product is added to anything"


def test_only_what_a_vector_holds_is_counted():
    """A wide vector made of single values is not as many wide vectors."""
    wide = "shufflevector <1 x half> %7, <1 x half> poison, <4 x i32>"
    assert battlemage_ir._size(f"{wide} <i32 0, i32 poison, i32 poison, i32 poison>") == 2
    assert battlemage_ir._size(f"{wide} zeroinitializer") == 8
    pair = "shufflevector <2 x float> %7, <2 x float> %8, <4 x i32> <i32 0, i32 1, i32 2, i32 3>"
    assert battlemage_ir._size(pair) == 16


def test_contraction_is_read_from_the_module():
    llir = LLIR.replace("%6 = fadd <8 x float> %5", "%9 = fmul float %1, %1\n  %6 = fadd float %9")
    off = module(3 << 16 | 16, 1, 31)
    assert battlemage_ir.count("", llir, module())["may_contract"]
    assert not battlemage_ir.count("", llir, off)["may_contract"]
    fma = module(6 << 16 | 12, 1, 2, 3, 26, 4)
    assert battlemage_ir.count("", LLIR, fma)["fma"] == 1


def test_dots_that_miss_the_matrix_unit_are_found():
    ttgir = (
        "#mma = #triton_intel_gpu.dpas<{}>\n#blocked = #ttg.blocked<{}>\n"
        "%1 = tt.dot %a : tensor<8x8xf16, #x> * tensor<8x8xf16, #x> -> tensor<8x8xf32, #mma>\n"
        "%2 = tt.dot %a : tensor<8x8xf16, #x> * tensor<8x8xf16, #x> -> tensor<8x8xf32, #blocked>\n"
    )
    assert battlemage_ir.count(ttgir, LLIR, module())["dots_elsewhere"] == 1


def test_the_dpas_of_a_dot():
    assert dot_dpas(8, 512, 128, 32) == 8
    assert dot_dpas(256, 256, 32, 32) == 32
    assert dot_dpas(8, 16, 16, 4) == 1, "each warp computes the one piece"


def test_the_declared_launches_are_those_of_the_ops():
    """The cases cannot import the ops, which import torch."""
    from benchmarks.battlemage_cases import attention, causal_conv1d, gated_delta_rule, norm
    from benchmarks.battlemage_cases import chunked_gated_delta_rule as chunked
    from vllm_b70 import chunk_grid
    from vllm_b70.ops import attention as attention_op
    from vllm_b70.ops import norm as norm_op
    from vllm_b70.ops import prompt_inputs, recurrent_steps

    for rows, split in zip((16, 17), attention.SPLITS, strict=True):
        plan = attention_op.plan(attention.SIZE, rows, "xpu")
        launches = (plan.split, split), (plan.walk, attention.WALK)
        for launch, declared in launches:
            assert vars(launch) == declared | {"registers": 0}
        assert plan.merge_warps == attention.MERGE["warps"]
        assert vars(plan.partition) == {"part": attention.PART, "tile": attention.TILE}
    assert attention_op.LIMIT == attention.LIMIT
    assert {n: norm_op.pieces(n) for n in norm.PIECES} == norm.PIECES
    for columns, launches in norm.LAUNCHES.items():
        size = 1 << (columns - 1).bit_length()
        assert {norm_op.choose(rows, size, "xpu") for rows in (1, 10**6)} == set(launches)
    for case in gated_delta_rule.cases():
        launch = gdn_launches.recurrent("xpu", case.constants["HV"])
        named = {"block": launch.block, "warps": launch.warps, "grf": launch.grf}
        assert case.tile == named | {"stages": 2} and not launch.overlap
    for case in chunked.cases():
        launch = gdn_launches.chunk(case.kernel.split(".")[2], "xpu", case.constants["H"])
        assert case.tile == {k.removeprefix("num_"): value for k, value in launch.items()}
    steps = (recurrent_steps.CONV_BLOCK, recurrent_steps.CONV_WARPS)
    assert steps == (causal_conv1d.CONV_BLOCK, causal_conv1d.CONV_WARPS)
    prompts = (prompt_inputs.BLOCK_TOKENS, prompt_inputs.WARPS, prompt_inputs.GRF, chunk_grid.GRID)
    c = causal_conv1d
    assert prompts == (c.BLOCK_TOKENS, c.WARPS, c.GRF, c.GRID)
