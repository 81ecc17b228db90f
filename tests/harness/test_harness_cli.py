import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeServer
from typer.testing import CliRunner

from vllm_b70.harness import cli
from vllm_b70.harness.quickstart import Cell

Start = Callable[..., FakeServer]


def verify(server: FakeServer, *arguments: object) -> Any:
    common = ["verify", "--base-url", server.base_url, "--model", "tiny", "--prompts", "6"]
    command = [*common, "--tokens", "12", *map(str, arguments)]
    return CliRunner().invoke(cli.app, command)


def test_verify_proves_an_exact_server(fake: Start, tmp_path: Path) -> None:
    trace, results = tmp_path / "trace.jsonl", tmp_path / "results.json"
    server = fake(holds=[1, 2, 4], trace=trace)
    outcome = verify(server, "--levels", "2,4", "--step-trace", trace, "--results", results)
    assert outcome.exit_code == 0, outcome.output
    steps = json.loads(results.read_text())["steps"]
    assert [(step["users"], step["mismatches"], step["mode"]) for step in steps] == [
        (1, 0, "oracle"),
        (2, 0, "verify"),
        (4, 0, "verify"),
    ]
    assert "Identity" in outcome.output


def test_verify_saves_the_oracle_and_uses_it_later(fake: Start, tmp_path: Path) -> None:
    oracle, first, second = (tmp_path / name for name in ("o.json", "1.jsonl", "2.jsonl"))
    server = fake(holds=[1, 2], trace=first)
    outcome = verify(server, "--levels", "2", "--step-trace", first, "--oracle", oracle)
    assert outcome.exit_code == 0, outcome.output
    server = fake(holds=[2], trace=second)
    outcome = verify(server, "--levels", "2", "--step-trace", second, "--oracle", oracle)
    assert outcome.exit_code == 0, outcome.output
    assert len(server.engine.bodies) == 6
    other_seed = verify(server, "--levels", "2", "--oracle", oracle, "--seed", "1")
    assert other_seed.exit_code == 2
    assert "other prompts" in other_seed.output


def test_a_failed_oracle_is_not_saved(fake: Start, tmp_path: Path) -> None:
    oracle = tmp_path / "oracle.json"
    assert verify(fake(mode="short"), "--levels", "1", "--oracle", oracle).exit_code == 1
    assert not oracle.exists()


def test_verify_catches_other_tokens_under_load(fake: Start, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    server = fake(mode="load", holds=[1, 4], trace=trace)
    outcome = verify(server, "--levels", "4", "--step-trace", trace)
    assert outcome.exit_code == 1
    assert "first divergence" in outcome.output and "FAILED" in outcome.output


def test_verify_keeps_partial_results_of_a_dead_server(fake: Start, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    outcome = verify(fake(mode="drop", after=8), "--levels", "2", "--results", results)
    assert outcome.exit_code == 3
    assert "STOPPED" in outcome.output and "1 finished steps are kept" in outcome.output
    assert len(json.loads(results.read_text())["steps"]) == 1


def test_verify_times_out(fake: Start) -> None:
    outcome = verify(fake(mode="hang"), "--levels", "2", "--timeout", "0.5")
    assert outcome.exit_code == 3
    assert "did not answer" in outcome.output


def test_verify_refuses_a_server_without_token_ids(fake: Start) -> None:
    outcome = verify(fake(mode="no_ids"), "--levels", "2")
    assert outcome.exit_code == 1
    assert "no token ids" in outcome.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--levels", "two"], "not numbers"),
        (["--levels", "2,7"], "cannot reach 7"),
        (["--lowest-token", "9", "--highest-token", "8"], "token range"),
        (["--base-url", "nowhere"], "not an http address"),
        (["--tokens", "500"], "must exceed a KV block"),
    ],
)
def test_verify_refuses_bad_input(fake: Start, arguments: list[str], reason: str) -> None:
    outcome = verify(fake(), "--levels", "2", *arguments)
    assert outcome.exit_code == 2, outcome.output
    assert reason in outcome.output


def test_verify_reports_a_refusing_server_as_bad_input(fake: Start) -> None:
    assert verify(fake(mode="http400"), "--levels", "2").exit_code == 2
    assert verify(fake(mode="http500"), "--levels", "2").exit_code == 3


def test_quickstart_hands_the_cells_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run_cells(cells: list[Cell], workdir: Path, results: Path, **options: Any) -> int:
        seen.update(options, cells=cells, workdir=workdir, results=results)
        return 3

    monkeypatch.setattr(cli, "run_cells", run_cells)
    monkeypatch.setattr(cli.signal, "signal", lambda *arguments: None)
    command = ["quickstart", "--control", "--cells", "naive|gptq", "--workdir", str(tmp_path)]
    outcome = CliRunner().invoke(cli.app, [*command, "--port", "9", "--tokens", "40"])
    assert outcome.exit_code == 3
    names = [cell.name for cell in seen["cells"]]
    assert names == [
        "gptq-27b",
        "gptq-27b-replica",
        "gptq-27b-mtp3",
        "gptq-27b-schedule",
        "ct-9b-naive",
    ]
    assert seen["results"] == tmp_path / "results.json"
    assert (seen["port"], seen["prompts"], seen["tokens"]) == (9, 36, 40)


def test_quickstart_refuses_an_unknown_cell() -> None:
    outcome = CliRunner().invoke(cli.app, ["quickstart", "--cells", "zebra"])
    assert outcome.exit_code == 2
    assert "no cell matches" in outcome.output
