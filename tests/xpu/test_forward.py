"""The tiny model to its logits on the XPU route, on CPU tensors that pose as an XPU's."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")
from vllm_b70.checkpoints.tiny import make_tiny

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


def test_a_step_beside_others_gives_the_bits_of_rows_alone(tmp_path, free_port, on_xpu):
    make_tiny(tmp_path / "model", format="ct", shape="9b")
    (result,), log = on_xpu(
        (HERE / "forward.py").read_text(),
        *(tmp_path / "model", free_port, HERE.parent / "kernels" / "conftest.py"),
        timeout=900,
        VLLM_B70="1",
        TRITON_INTERPRET="1",
    )
    assert result["shape"] == [10, 1024] and result["finite"], log[-3000:]
    assert len(set(result["tokens"])) > 5
    assert result["equal"]
    assert set(result["launches"]) >= LAUNCHES
