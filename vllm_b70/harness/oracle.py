"""The oracle: what every prompt answers when it has the server to itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from vllm_b70.harness.client import Client, Completion, HarnessError

Progress = Callable[[int, int], None]
"""Called with the number of finished prompts and the number of all prompts."""

_SCHEMA = "vllm_b70.oracle.v1"


class OracleError(HarnessError):
    """An oracle file that cannot be read or belongs to other prompts, tokens or another model."""


async def run_alone(
    client: Client,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    progress: Progress | None = None,
) -> list[Completion]:
    """Answer the prompts one at a time, each started after the one before has finished.

    Raises:
        ServerError, ResponseError: from the first request that fails.
    """
    completions = []
    for prompt in prompts:
        completions.append(await client.complete(prompt, max_tokens))
        if progress is not None:
            progress(len(completions), len(prompts))
    return completions


def prompts_hash(prompts: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 of the prompts' token ids, as hexadecimal digits."""
    text = json.dumps([list(prompt) for prompt in prompts], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def save_oracle(
    path: Path,
    completions: Sequence[Completion],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    model: str,
) -> None:
    """Write an oracle as JSON, replacing ``path`` in one step.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(
        {
            "schema": _SCHEMA,
            "model": model,
            "max_tokens": max_tokens,
            "prompts_sha256": prompts_hash(prompts),
            "completions": [asdict(completion) for completion in completions],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def load_oracle(
    path: Path, prompts: Sequence[Sequence[int]], max_tokens: int, model: str
) -> list[Completion]:
    """Read an oracle that was made for exactly these prompts, this length and this model name.

    Raises:
        OracleError: the file is unreadable or was made for something else.
    """
    try:
        record = json.loads(path.read_text())
        schema = record["schema"]
        found = (record["prompts_sha256"], record["max_tokens"], record["model"])
        completions = [Completion(**fields) for fields in record["completions"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OracleError(f"{path} is not a readable oracle file: {error}") from error
    if schema != _SCHEMA:
        raise OracleError(f"{path} has schema {schema!r}; this version reads {_SCHEMA!r}")
    wanted = (prompts_hash(prompts), max_tokens, model)
    for name, have, want in zip(
        ("prompts (SHA-256)", "max_tokens", "model"), found, wanted, strict=True
    ):
        if have != want:
            raise OracleError(f"{path} was made for other {name}: {have}, but this run has {want}")
    if len(completions) != len(prompts):
        raise OracleError(f"{path} holds {len(completions)} answers to {len(prompts)} prompts")
    return completions
