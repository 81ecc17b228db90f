"""vLLM's V2 runner on the XPU route captures the tiny model and its drafter, and every graph is
verified, on CPU tensors that pose as an XPU's."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")
from vllm_b70.checkpoints import tiny

HERE = Path(__file__).parent
#: As small as the kernels allow: all of it runs in Triton's interpreter.
SHAPE = tiny.TinyShape(
    heads=2, kv_heads=1, linear_key_heads=1, linear_value_heads=2, intermediate=128, hidden=128,
    vocab=256,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, on_xpu):
    model = tmp_path_factory.mktemp("graphs") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.SHAPES, "9b", SHAPE)
        tiny.make_tiny(model, format="ct", shape="9b")
    results, log = on_xpu(
        (HERE / "graphs.py").read_text(),
        *(model, free_port(), HERE.parent / "kernels" / "conftest.py"),
        timeout=900,
        VLLM_B70="1",
        VLLM_B70_CENSUS="off",
        TRITON_INTERPRET="1",
    )
    assert results, log[-3000:]
    return results[0] | {"log": log}


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_all_sizes_and_depths_are_captured_and_pass(run):
    target, prefill, decode = run["graphs"]
    assert target == prefill == [[1, 2, 0], [1, 3, 0], [2, 4, 0]]
    assert decode == [[2, 2, 2]]
    assert "graphs: 3 of the target and 4 of the drafter have the bits of eager" in run["log"]
    # The comparison says something.
    assert run["finite"] and run["deaf"] == []
    assert run["left"] == 0, "the caches are as vLLM made them"


def test_a_wait_while_recording_and_no_room_are_sentences(run):
    assert "synchronize would wait for the device while a graph is recorded" in run["waits"]
    assert "there is no room on the device for all graphs (2 of the target's 3" in run["full"]
    assert "these sizes fit: use --cudagraph-capture-sizes 2," in run["full"]


def test_faults_of_one_graph_are_found_in_it(run):
    assert run["found"].pop("none") == []
    expected = run["expected"]
    assert run["found"].keys() == expected.keys()
    for name, found in run["found"].items():
        assert {line.partition(":")[0] for line in found} == {
            "2 requests of 2 tokens (depth 1, then 2 drafts each)"
        }, name
        assert any(line.endswith(expected[name]) for line in found), (name, found)


def test_drafts_that_were_made_without_their_graph_are_no_proof(run):
    size = "2 requests of 2 tokens (depth 1, then 2 drafts each)"
    assert f"the drafter has a graph for {size}, but vLLM ran" in run["drafts without their graph"]


def test_the_drafter_can_be_left_eager(run):
    assert run["drafter left eager"] == [3, 0, 0]
