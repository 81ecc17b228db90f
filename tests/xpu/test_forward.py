"""The tiny model to its logits on the XPU route, on CPU tensors that pose as an XPU's."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")
from vllm_b70.checkpoints.tiny import make_tiny
from vllm_b70.ops.row_classes import members_of

HERE = Path(__file__).parent
#: Kernels of ours, with the registers of a thread that only an XPU's launch asks for.
LAUNCHES = {
    "rms_norm None",
    "split 256",  # the linears, and attention's few rows
    "merge None",
    "prompts 256",
    "advance 256",
    "steps None",
    "place None",
}


def forward(model, free_port, on_xpu, **environ):
    results, log = on_xpu(
        (HERE / "forward.py").read_text(),
        *(model, free_port, HERE.parent / "kernels" / "conftest.py"),
        timeout=900,
        VLLM_B70="1",
        TRITON_INTERPRET="1",
        **environ,
    )
    assert results, log[-3000:]
    (result,) = results
    assert result["shape"] == [10, 1024] and result["finite"], log[-3000:]
    assert len(set(result["tokens"])) > 5
    assert result["equal"]
    return result, log


def test_a_step_beside_others_gives_the_bits_of_rows_alone(tmp_path, free_port, on_xpu):
    make_tiny(tmp_path / "model", format="ct", shape="9b")
    result, _ = forward(tmp_path / "model", free_port, on_xpu)
    assert set(result["launches"]) >= LAUNCHES


def test_the_same_through_intels_int4_kernel(tmp_path, free_port, on_xpu):
    """It has planted row classes, and is called with the rows of one of them only."""
    make_tiny(tmp_path / "model", format="ct", shape="9b")
    environ = {"VLLM_B70_LINEAR": "native", "VLLM_CACHE_ROOT": str(tmp_path)}
    result, log = forward(tmp_path / "model", free_port, on_xpu, **environ)
    int4 = [members_of(tuple(spans)) for op, _, spans in result["settled"] if op == "int4_linear"]
    # Of the planted classes, 1-8, 9-64, 65-299 and more, the first that reaches 128 rows, as far as
    # it was asked.
    assert int4 == [(128, 256)] * 3, log[-3000:]
    assert result["rows of int4"] == [128]
    assert {op for op, _, _ in result["settled"]} == {"int4_linear", "linear", "lm_head"}
    assert "int4_linear 256x512 group 32" in log and "7 of 7 shapes native, digest" in log
    assert len(list((tmp_path / "vllm_b70" / "linears").glob("*/*.json"))) == 7
