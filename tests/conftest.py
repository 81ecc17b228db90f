"""What all tests share."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# Set before torch is imported: two cores, and no test may depend on how many threads run.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture
def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def catch_up_runs(tmp_path_factory):
    """What the engines of ``e2e/catch_up_engine.py`` found, by name."""
    script = Path(__file__).parent / "e2e" / "catch_up_engine.py"
    model = tmp_path_factory.mktemp("catch_up") / "model"
    command = [sys.executable, str(script), str(model)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, run.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT"))
