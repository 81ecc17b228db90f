"""The doctor on the machine with two cards, against its kept output."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

KEPT = Path(__file__).parents[1] / "doctor" / "outputs" / "xpu-stubs.json"
SCRIPT = """
import json, sitecustomize, sys
from vllm_b70.doctor import report
sitecustomize.machine(**json.loads(sys.argv[1]))
findings = report.examine(None, 1, 0, 8192, 2)
print("RESULT", json.dumps(report.as_json(findings)))
"""


def findings(output):
    return [f for f in output["findings"] if f["group"] != "software"]


def test_the_kept_output(on_xpu):
    (found,), log = on_xpu(SCRIPT, "{}", VLLM_B70="1")
    kept = json.loads(KEPT.read_text())
    for a, b in zip(findings(found), findings(kept), strict=True):
        assert (a["what"], a["severity"], a["remedy"]) == (b["what"], b["severity"], b["remedy"])
    names = {f["what"]: f["found"] for f in found["findings"]}
    assert names["xpu:1"].startswith("Intel(R) Arc(TM) Pro B70 Graphics, 32 GiB, 31 GiB free")
    assert names["a process with VLLM_B70=1"] == "B70XpuPlatform"


def test_what_a_card_lacks(on_xpu):
    machine = {"cards": 1, "graphs": False, "name": "Some card", "has_subgroup_2d_block_io": False}
    (found,), log = on_xpu(SCRIPT, json.dumps(machine))
    severities = {f["what"]: f["severity"] for f in found["findings"]}
    assert severities["xpu:0"] == severities["graphs"] == "warning"
    assert severities["2 cards"] == severities["matrix unit of xpu:0"] == "error"
    assert severities["VLLM_B70"] == "note" and found["worst"] == "error"
