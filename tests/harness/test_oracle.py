import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_vllm import FakeServer, true_token

from vllm_b70.harness.client import Client, Completion
from vllm_b70.harness.oracle import (
    OracleError,
    load_oracle,
    prompts_hash,
    run_alone,
    save_oracle,
)

Start = Callable[..., FakeServer]


def test_prompts_are_answered_alone_in_order(fake: Start, prompts: list[list[int]]) -> None:
    server = fake(mode="load")
    seen: list[tuple[int, int]] = []

    async def run() -> list[Completion]:
        async with Client(server.base_url, "tiny") as client:
            return await run_alone(
                client, prompts, 8, lambda done, total: seen.append((done, total))
            )

    answers = asyncio.run(run())
    assert server.engine.max_running == 1
    assert [body["prompt"] for body in server.engine.bodies] == prompts
    assert [answer.token_ids for answer in answers] == [
        [true_token(prompt, position) for position in range(8)] for prompt in prompts
    ]
    assert seen == [(done, 6) for done in range(1, 7)]


def test_a_saved_oracle_comes_back_bit_for_bit(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    # A float32 value widened to a double, as vLLM sends it.
    answers = [completion([1, 2], [-0.10000000149011612, -1e-45])]
    path = tmp_path / "new" / "oracle.json"
    save_oracle(path, answers, [[5]], 2, "tiny")
    assert load_oracle(path, [[5]], 2, "tiny") == answers
    assert [entry.name for entry in path.parent.iterdir()] == ["oracle.json"]


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "model", "reason"),
    [
        ([[6]], 2, "tiny", "other prompts"),
        ([[5], [5]], 2, "tiny", "other prompts"),
        ([[5]], 3, "tiny", "other max_tokens"),
        ([[5]], 2, "large", "other model"),
    ],
)
def test_an_oracle_for_something_else_is_refused(
    tmp_path: Path,
    completion: Callable[..., Completion],
    prompts: list[list[int]],
    max_tokens: int,
    model: str,
    reason: str,
) -> None:
    path = tmp_path / "oracle.json"
    save_oracle(path, [completion([1, 2])], [[5]], 2, "tiny")
    with pytest.raises(OracleError, match=reason):
        load_oracle(path, prompts, max_tokens, model)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "another"},
        {"completions": []},
        {"completions": [{"token_ids": [1]}]},
        {"completions": None},
    ],
)
def test_a_damaged_oracle_is_refused(
    tmp_path: Path, completion: Callable[..., Completion], change: dict[str, object]
) -> None:
    path = tmp_path / "oracle.json"
    save_oracle(path, [completion([1, 2])], [[5]], 2, "tiny")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(OracleError):
        load_oracle(path, [[5]], 2, "tiny")


def test_files_that_are_no_oracle_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "oracle.json"
    for text in ("", "{", "[]", "3", "{}"):
        path.write_text(text)
        with pytest.raises(OracleError, match="not a readable oracle"):
            load_oracle(path, [[5]], 2, "tiny")
    with pytest.raises(OracleError):
        load_oracle(tmp_path / "missing.json", [[5]], 2, "tiny")


def test_the_hash_sees_boundaries_between_prompts() -> None:
    assert prompts_hash([[1, 2], [3]]) != prompts_hash([[1], [2, 3]])
    assert prompts_hash([[1, 23]]) != prompts_hash([[12, 3]])
