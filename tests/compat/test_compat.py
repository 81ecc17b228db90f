"""Every seam still fits, and every patch is still needed."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")
from vllm_b70.checkpoints.tiny import make_tiny
from vllm_b70.compat.seams import SEAMS, Seam, difference
from vllm_b70.compat.versions import SUPPORTED, installed_vllm

pytestmark = pytest.mark.compat


def test_the_installed_vllm_is_in_the_range():
    assert installed_vllm().startswith(tuple(f"{minor}." for minor in SUPPORTED))


@pytest.mark.parametrize("name", SEAMS)
def test_seam(name):
    assert difference(SEAMS[name]) is None


@pytest.mark.parametrize(
    ("seam", "found"),
    [
        (Seam("vllm.no_such_module", "x", (), ""), "not there"),
        (Seam("vllm.v1.attention.backend", "NoSuchClass", (), ""), "not there"),
        (Seam("vllm.v1.attention.backend", "CommonAttentionMetadata", ("gone",), ""), "'gone'"),
        (Seam("vllm.plugins", "load_general_plugins", ("x",), ""), "parameters are ()"),
    ],
)
def test_a_seam_that_moved_is_described(seam, found):
    assert found in difference(seam)


def test_the_patch_for_a_missing_mtp_head_is_still_needed(tmp_path):
    """If this fails, vLLM names the reason itself: remove compat/mtp_head.py."""
    make_tiny(tmp_path / "model", format="bf16", shape="9b", mtp=False)
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        f"EngineArgs(model={str(tmp_path / 'model')!r}, speculative_config="
        "{'method': 'mtp', 'num_speculative_tokens': 3}).create_engine_config()"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_B70")}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )
    assert "integer modulo by zero" in run.stderr
