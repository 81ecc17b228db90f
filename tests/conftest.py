"""What all tests share."""

import os
import socket

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
