"""Fixtures: fake servers, consoles that record, free ports."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from fake_vllm import FakeServer  # noqa: E402

from vllm_b70.harness.client import Completion  # noqa: E402
from vllm_b70.harness.prompts import make_prompts  # noqa: E402


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeServer]]:
    """Start fake servers in this process; all are stopped at the end of the test."""
    servers: list[FakeServer] = []

    def start(**options: Any) -> FakeServer:
        server = FakeServer(**options).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def console() -> Console:
    """A console whose text is in ``console.file.getvalue()``."""
    return Console(file=io.StringIO(), width=200, force_terminal=False)


@pytest.fixture
def prompts() -> list[list[int]]:
    """Six prompts."""
    return make_prompts([1, 5, 3, 70, 9, 2], 0, (10, 900))


@pytest.fixture
def completion() -> Callable[..., Completion]:
    def make(tokens: list[int], logprobs: list[float] | None = None) -> Completion:
        return Completion(
            token_ids=tokens,
            logprobs=logprobs if logprobs is not None else [-0.5] * len(tokens),
            top2_gap=[1.0] * len(tokens),
            finish_reason="length",
            prompt_tokens=3,
            cached_tokens=None,
            elapsed_s=0.1,
        )

    return make
