"""What the compiler makes of the Hopper kernel, on any machine: no GPU is needed to compile it.

Whether a launch gives the right bits is asked in tests/gpu."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from benchmarks import hopper  # noqa: E402
from vllm_b70.ops.hopper import compiles  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1" or not compiles():
    pytest.skip("no Triton that compiles the Hopper kernel", allow_module_level=True)


def test_the_machine_code():
    """In a process of its own, because Triton's libraries complain of themselves at its end."""
    command = [sys.executable, hopper.__file__, "--few"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Case(") == 8


FIRST = "HGMMA.64x128x16.F32 R24, R88, gdesc[UR8], RZ, !UPT"
LAST = "HGMMA.64x128x16.F32 R24, R92, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def test_a_waited_chain_has_no_hazard():
    harmless = "LOP3.LUT R96, R97, 0xf, R98, 0xea, !PT"
    after = ["MOV R88, R96", "FADD R0, R24, R1"]
    assert hopper.hazards([FIRST, LAST, harmless, WAIT, *after]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MOV R89, R0", "overwritten"),
        ("LDG.E.128 R92, [R2.64]", "overwritten"),
        ("LDS.64 R87, [R2]", "overwritten"),
        ("FMUL R0, R30, R1", "sum read"),
        ("ST.E [R2.64], R24", "sum read"),
        ("BRA `(.L_x_1)", "control flow"),
        (FIRST.replace("R88", "R100"), "sum in flight"),
        ("HGMMA.64x64x16.F32 R80, R100, gdesc[UR8], RZ, !UPT", "weight in flight"),
    ],
)
def test_hazards_are_found(text, message):
    """Were they not, machine code without any would show nothing."""
    assert message in "; ".join(hopper.hazards([FIRST, LAST, text, WAIT]))


def test_an_address_has_two_registers():
    """Loading 16 bytes from the pair below a sum reads nothing of it."""
    assert hopper.hazards([FIRST, LAST, "LDG.E.128 R20, desc[UR4][R22.64]", WAIT]) == []
    assert hopper.hazards([FIRST, LAST, "LDG.E.128 R20, desc[UR4][R23.64]", WAIT])


def test_loops_are_the_innermost():
    sass = [".L_x_1:", "/*0000*/ NOP ;", ".L_x_2:", f"/*0010*/ {LAST} ;", f"/*0020*/ {WAIT} ;",
            "/*0030*/ @!P0 BRA `(.L_x_2) ;", "/*0040*/ BRA `(.L_x_1) ;"]  # fmt: skip
    assert hopper.loops(*hopper.parse("\n".join(sass))) == [[LAST, WAIT, "BRA `(.L_x_2)"]]


GOOD = {
    "hazards": [], "hgmma": 16, "loops": [8, 8], "spills": 0, "loop_spills": 0, "ffma": 0,
    "hmma": 0, "serialised": 0, "registers": 168, "shared": 232448,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hazards", ["x"]), ("hgmma", 32), ("loops", [8]), ("spills", 4), ("loop_spills", 2),
        ("ffma", 1), ("hmma", 1), ("serialised", 1), ("registers", 169), ("shared", 232449),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(name, value):
    assert hopper.complaints(GOOD) == []
    assert len(hopper.complaints(GOOD | {name: value})) == 1
    assert len(hopper.complaints(GOOD | {name: value}, "tiles")) == (name != "spills")
