"""The README's figures are those of the results that are kept."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FOUR = {(24576, 4096), (4096, 12288), (10240, 4096), (4096, 4096)}
INT4_ROWS = [(1, 16), (32, 32), (64, 64), (128, 128), (256, 256), (512, 512), (1024, 4096)]
LINEAR_ROWS = [*INT4_ROWS[:5], (512, 4096)]


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def span(values):
    values = list(values)
    return f"{min(values):.2f}-{max(values):.2f}"


def line(start):
    found = [row for row in README.splitlines() if row.startswith(start)]
    assert len(found) == 1, start
    return [cell.strip() for cell in found[0].strip("|").split("|")][1:]


@pytest.mark.parametrize("peer", ["marlin", "machete"])
def test_int4_ratios(peer):
    rows = [
        r
        for r in results("gemm-h200.json")["rows"]
        if r["run"] in (0, 7, 9) and r["peer"] == peer and (r["n"], r["k"]) in FOUR
    ]
    want = [span(r["ratio"] for r in rows if a <= r["rows"] <= b) for a, b in INT4_ROWS]
    assert line(f"| against {peer.title()}") == want


def test_linear_ratios_and_argmax():
    rows = [r for r in results("gemm-h200.json")["rows"] if r["run"] in (2, 3, 4, 8, 10)]
    bf16 = [r for r in rows if r["op"] == "linear" and r["dtype"] == "bfloat16"]
    want = [span(r["ratio"] for r in bf16 if a <= r["rows"] <= b) for a, b in LINEAR_ROWS]
    assert line("| 248320x4096, 12288x4096, 4096x4096") == want
    floors = [
        1 / r["ratio"]
        for r in rows
        if r["op"] == "linear_argmax" and r["peer"].startswith("floor") and r["rows"] <= 64
    ]
    assert f"takes {span(floors)} of the time" in README


def test_zero_flip_cells():
    rows = {
        (r["route"], r["depth"], r["users"]): r
        for r in results("exact-h200.json")["rows"]
        if r["model"] == "wide-9b"
    }
    for start, route, depth in (
        ("| this plugin, no speculation", "exact", 0),
        ("| this plugin, MTP depth 3", "exact", 3),
        ("| stock, no speculation", "stock", 0),
        ("| stock, MTP depth 3", "stock", 3),
    ):
        row, alone = rows[route, depth, 64], rows[route, depth, 1]
        counts = [
            f"{row[name]} of {row['sequences']}" for name in ("mismatches", "logprob_mismatches")
        ]
        speeds = [f"{r['tokens_per_s']:,.0f}" for r in (alone, row)]
        assert line(start) == [*counts, *speeds, f"{row['prompt_tokens_per_s']:,.0f}"]
    assert f"({rows['exact', 3, 64]['acceptance']:.0%} of drafts accepted)" in README


def test_every_cell_of_the_route_is_exact():
    rows = [r for r in results("exact-h200.json")["rows"] if r["route"] == "exact"]
    judged = [r for r in rows if "mismatches" in r]
    assert all(r["mismatches"] == r["logprob_mismatches"] == 0 for r in judged)
    assert not any(r.get("differ_again") for r in rows)
    tiny = [r for r in judged if r["model"] == "tiny-9b"]
    assert {(r["users"], r["depth"]) for r in tiny} >= {
        (users, depth) for users in (8, 32, 64, 128) for depth in (0, 1, 3, 6)
    }
    assert all(r["sequences"] == 128 for r in tiny)
    assert all(0.1 < r["acceptance"] < 0.9 for r in tiny if r["depth"])


def test_draft_head():
    rows = results("draft-h200.json")["rows"]
    passes = {
        (r["layer"], r["head"]): r["us"] for r in rows if r["op"] == "draft_pass" and r["rows"] == 1
    }
    shown = ", ".join(
        f"{passes[key]:.0f}"
        for key in (
            ("16-bit", "16-bit"), ("16-bit", "int4"), ("16-bit", "int4, shortlist"),
            ("int4", "int4, shortlist"),
        )
    )  # fmt: skip
    assert f"{shown} us" in README
    few = [
        r["of_floor"]
        for r in rows
        if r["op"] == "int4_argmax" and r["n"] == 248320 and r["rows"] <= 16
    ]
    assert f"{span(few)} of the floor" in README


def test_attention_ratios():
    ratio = {
        r["shape"]: r["ratio"]
        for r in results("path-h200.json")["rows"]
        if r["op"] == "attention" and r["group"] == 4
    }
    decode = span(ratio[f"64x{keys}x1"] for keys in (2048, 8192, 32768))
    assert f"{decode}\nat 64 sequences" in README
    alone = [ratio[f"1x{keys}x1"] for keys in (2048, 8192, 32768)]
    shown = f"{alone[0]:.2f}, {alone[1]:.1f} and {alone[2]:.1f}"
    assert f"{shown} at one sequence of 2K, 8K and 32K" in README
    assert f"a prompt of 8K {ratio['1x8192x8192']:.1f}" in README


def test_gated_delta_net_ratios():
    rows = [r for r in results("path-h200.json")["rows"] if r["op"] == "gated_delta_net"]

    def fastest(phase):
        """Against the fastest of vLLM's kernels, for each shape."""
        ratios = {}
        for r in rows:
            if r["phase"] == phase:
                ratios.setdefault((r["heads"], r["requests"], r["rows"]), []).append(r["ratio"])
        return span(min(found) for found in ratios.values())

    shown = (
        f"decode {fastest('decode')}, verification of 4 tokens {fastest('verify')}; "
        f"prompts {fastest('prefill')} against vLLM's Triton route (FLA)"
    )
    assert shown in README.replace("\n", " ")
    assert {r["peer"] for r in rows if r["phase"] == "prefill"} == {"vllm_fla"}


def test_norms_of_the_floor():
    rows = [
        r["of_floor"]
        for r in results("path-h200.json")["rows"]
        if r["op"] in ("rms_norm", "add_rms_norm") and r["columns"] == 4096
    ]
    assert f"Norms of 4,096 columns run at {span(rows)} of the speed" in README
