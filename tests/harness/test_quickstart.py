import io
import json
import socket
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_b70.harness import quickstart
from vllm_b70.harness.client import HarnessError
from vllm_b70.harness.quickstart import (
    Cell,
    ExitCode,
    check_cells,
    check_environment,
    default_cells,
    run_cells,
    select_cells,
    serve_argv,
    token_range,
)

FAKE = str(Path(__file__).with_name("fake_vllm.py"))
PLAIN = Cell("plain", "ct", "9b", 0, None, (2, 4))
DRAFTS = Cell("drafts", "ct", "9b", 3, None, (1, 4))

Run = Callable[..., int]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the tiny models by bare configurations; returns the directories made."""
    made: list[Path] = []

    def make_tiny(
        directory: Path, *, format: str, shape: str, seed: int, conditional: bool = False
    ) -> None:
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"vocab_size": 1000}))
        made.append(directory)

    module = types.ModuleType("vllm_b70.checkpoints.tiny")
    module.make_tiny = make_tiny  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_b70.checkpoints.tiny", module)
    return made


@pytest.fixture
def run(tmp_path: Path, free_port: int, console: Console, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run cells on fake servers; ``modes`` maps a cell's name to options of its engine."""

    def start(cells: list[Cell], modes: dict[str, dict[str, Any]] | None = None) -> int:
        plan: dict[str, dict[str, Any]] = {}
        oracles: set[str] = set()
        for cell in cells:
            alone = [] if cell.oracle in oracles else [1]
            oracles.add(cell.oracle)
            plan[cell.name] = {"holds": [*alone, *cell.users], **(modes or {}).get(cell.name, {})}
        monkeypatch.setenv("FAKE_PLAN", json.dumps(plan))
        return run_cells(
            cells,
            tmp_path / "work",
            tmp_path / "results.json",
            port=free_port,
            prompts=6,
            tokens=32,
            program=[sys.executable, FAKE],
            start_timeout_s=120,
            request_timeout_s=120,
            console=console,
        )

    return start


@pytest.fixture
def steps(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    def read() -> list[dict[str, Any]]:
        record = json.loads((tmp_path / "results.json").read_text())
        assert "python" in record["versions"]
        return list(record["steps"])

    return read


Steps = Callable[[], list[dict[str, Any]]]


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_whole_proof(
    run: Run, steps: Steps, console: Console, tmp_path: Path, tiny: list[Path]
) -> None:
    cells = [
        PLAIN,
        DRAFTS,
        Cell("replica", "ct", "9b", 3, None, (4,), replica_of="drafts"),
        Cell("scheduled", "ct", "9b", 3, [[1, 2, 3], [3, 6, 1]], (4,)),
        Cell("gptq", "gptq", "9b", 0, None, (4,)),
        Cell("control", "ct", "9b", 0, None, (4,), {"SOME": "x"}, expect_mismatches=True),
    ]
    code = run(cells, {"control": {"mode": "naive"}})
    assert code == ExitCode.OK, text(console)
    found = steps()
    assert [(step["name"], step["users"], step["mode"]) for step in found] == [
        ("plain", 1, "oracle"),
        ("plain", 2, "exact"),
        ("plain", 4, "exact"),
        ("drafts", 1, "exact"),
        ("drafts", 4, "exact"),
        ("replica", 4, "exact"),
        ("scheduled", 4, "exact"),
        ("gptq", 1, "oracle"),
        ("gptq", 4, "exact"),
        ("control", 1, "oracle"),
        ("control", 4, "control"),
    ]
    assert not any(step["failures"] for step in found)
    assert all(step["max_running"] == step["users"] for step in found)
    assert [directory.name for directory in tiny] == ["ct-9b", "gptq-9b"]
    assert set(found[4]["widths"]) == {"4"}
    assert set(found[6]["widths"]) == {"2", "4"} and found[6]["width_changes"] > 0
    control = found[-1]
    assert control["mismatches"] > 0 and "SOME=x" in control["command"]
    # The control's own answers alone are its reference: here they differ from the exact ones.
    assert found[-2]["token_hash"] != found[0]["token_hash"]
    assert "results: " in text(console) and "Identity" in text(console)


def test_replica_pairs_start_with_empty_caches(run: Run, steps: Steps) -> None:
    replica = Cell("replica", "ct", "9b", 3, None, (4,), replica_of="drafts")
    assert run([PLAIN, DRAFTS, replica]) == ExitCode.OK
    commands = {step["name"]: step["command"] for step in steps()}
    caches = {}
    for name, command in commands.items():
        caches[name] = [
            word.partition("=")[2]
            for word in command.split()
            if "_CACHE_" in word.partition("=")[0]
        ]
    assert caches["plain"] == []
    assert len(caches["drafts"]) == len(caches["replica"]) == 3
    assert len(set(caches["drafts"]) | set(caches["replica"])) == 6
    assert all(Path(cache).is_dir() for cache in caches["drafts"])


def test_a_mismatch_under_load_exits_1(run: Run, steps: Steps, console: Console) -> None:
    later = Cell("later", "ct", "9b", 0, None, (2,))
    assert run([PLAIN, later], {"plain": {"mode": "load"}}) == ExitCode.FAILED
    found = steps()
    assert found[1]["mismatches"] > 0
    # A failed proof does not keep the rest from being tried.
    assert found[-1]["name"] == "later" and not found[-1]["failures"]
    assert "FAILED plain, 2 users" in text(console)


def test_other_tokens_of_a_later_server_exit_1(run: Run, steps: Steps) -> None:
    assert run([PLAIN, DRAFTS], {"drafts": {"mode": "other"}}) == ExitCode.FAILED
    assert [step["mismatches"] for step in steps()] == [0, 0, 0, 6, 6]


def test_a_replica_with_other_tokens_exits_1(run: Run, steps: Steps) -> None:
    replica = Cell("replica", "ct", "9b", 3, None, (4,), replica_of="drafts")
    code = run([PLAIN, DRAFTS, replica], {"replica": {"mode": "other"}})
    assert code == ExitCode.FAILED
    assert any("are not those of drafts" in failure for failure in steps()[-1]["failures"])


def test_a_control_without_mismatches_exits_1(run: Run, steps: Steps, console: Console) -> None:
    control = Cell("control", "ct", "9b", 0, None, (4,), {"SOME": "x"}, expect_mismatches=True)
    # Other tokens than the exact server's, but the same in company: that shows nothing.
    assert run([PLAIN, control], {"control": {"mode": "other"}}) == ExitCode.FAILED
    reason = "the control shows no mismatch: this run proves nothing"
    assert steps()[-1]["failures"] == [reason]
    assert reason in text(console)


def test_a_dead_server_exits_3_and_keeps_what_was_finished(
    run: Run, steps: Steps, console: Console
) -> None:
    code = run([PLAIN, DRAFTS], {"drafts": {"mode": "die", "after": 8}})
    assert code == ExitCode.SERVER_DIED
    found = steps()
    assert [step["name"] for step in found] == ["plain", "plain", "plain", "drafts"]
    assert "STOPPED in drafts" in text(console)
    assert "the engine is out of luck" in text(console)
    assert "the 4 finished steps are kept in" in text(console)


def test_a_server_that_does_not_start_exits_3(run: Run, steps: Steps, console: Console) -> None:
    assert run([PLAIN], {"plain": {"mode": "never"}}) == ExitCode.SERVER_DIED
    assert steps() == []
    assert "there is no such model" in text(console)


def test_missing_token_ids_exit_1(run: Run, steps: Steps, console: Console) -> None:
    assert run([PLAIN], {"plain": {"mode": "no_ids"}}) == ExitCode.FAILED
    assert "FAILED in plain: The response holds no token ids" in text(console)


def test_refused_requests_exit_1(run: Run, console: Console) -> None:
    assert run([PLAIN], {"plain": {"mode": "http400"}}) == ExitCode.FAILED
    assert "no, thank you" in text(console)


@pytest.mark.parametrize(("accept", "share"), [(0, "0.0000"), (3, "1.0000")])
def test_speculation_that_is_always_or_never_right_exits_1(
    run: Run, steps: Steps, accept: int, share: str
) -> None:
    assert run([PLAIN, DRAFTS], {"drafts": {"accept": accept}}) == ExitCode.FAILED
    assert any(share in failure for failure in steps()[-1]["failures"])


def test_periodic_outputs_exit_1(run: Run, steps: Steps) -> None:
    assert run([PLAIN], {"plain": {"mode": "periodic"}}) == ExitCode.FAILED
    assert any("period" in failure for failure in steps()[0]["failures"])


def test_a_schedule_that_never_changes_exits_1(run: Run, steps: Steps) -> None:
    cell = Cell("scheduled", "ct", "9b", 3, [[1, 8, 3], [9, 32, 1]], (4,))
    assert run([PLAIN, cell]) == ExitCode.FAILED
    assert steps()[-1]["failures"] == ["the depth never changed: the schedule was not tested"]


def test_short_answers_exit_1(run: Run, steps: Steps) -> None:
    assert run([PLAIN], {"plain": {"mode": "short"}}) == ExitCode.FAILED
    failures = " ".join(steps()[0]["failures"])
    assert "shorter than the 32 tokens" in failures and "cannot be measured" in failures


def test_a_port_in_use_exits_2(run: Run, free_port: int, console: Console) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        assert run([PLAIN]) == ExitCode.BAD_INPUT
    assert "cannot be used" in text(console)


def test_an_inherited_switch_exits_2(
    run: Run, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    monkeypatch.setenv("VLLM_B70", "1")
    check_environment()
    monkeypatch.setenv("VLLM_B70_LINEAR", "naive")
    assert run([PLAIN]) == ExitCode.BAD_INPUT
    assert "unset VLLM_B70_LINEAR" in text(console)


def test_a_full_disk_exits_3(run: Run, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **more: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise ValueError("no room for the checkpoint") from error

    monkeypatch.setattr(sys.modules["vllm_b70.checkpoints.tiny"], "make_tiny", full)
    assert run([PLAIN]) == ExitCode.SERVER_DIED
    assert "is full" in text(console)


def test_too_few_tokens_or_prompts_exit_2(
    run: Run, tmp_path: Path, console: Console, free_port: int
) -> None:
    for prompts, tokens in ((6, 31), (6, 460), (3, 32)):
        code = run_cells(
            [PLAIN],
            tmp_path,
            tmp_path / "r.json",
            port=free_port,
            prompts=prompts,
            tokens=tokens,
            console=console,
        )
        assert code == ExitCode.BAD_INPUT
    assert not (tmp_path / "r.json").exists()


def test_the_command_line_of_a_cell() -> None:
    cell = Cell("x", "ct", "9b", 3, [[1, 8, 3]], (2,), serve_args=("--enforce-eager",))
    argv = serve_argv(cell, Path("dir"), 8123)
    assert argv[:4] == ["serve", "dir", "--port", "8123"]
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 8, 3]],
    }
    assert argv[-1] == "--enforce-eager"
    assert "--speculative-config" not in serve_argv(PLAIN, Path("dir"), 1)
    for option, value in (
        ("--served-model-name", "tiny"),
        ("--max-model-len", "512"),
        ("--max-num-seqs", "32"),
        ("--max-num-batched-tokens", "512"),
        ("--kv-cache-memory-bytes", "1G"),
    ):
        assert argv[argv.index(option) + 1] == value


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("control", [False, True])
def test_the_default_matrix_can_be_run_and_so_can_each_of_its_cells(
    full: bool, control: bool
) -> None:
    cells = default_cells(full=full, control=control)
    check_cells(cells, 36)
    assert any(cell.expect_mismatches for cell in cells) is control
    for cell in cells:
        chosen = select_cells(cells, f"^{cell.name}$")
        check_cells(chosen, 36)
        assert cell in chosen and len(chosen) <= 3


def test_selection_adds_what_is_needed_and_nothing_else() -> None:
    cells = default_cells(control=True)
    chosen = select_cells(cells, "replica")
    assert [(cell.name, cell.users) for cell in chosen] == [
        ("gptq-27b", (32,)),
        ("gptq-27b-replica", (32,)),
    ]
    chosen = select_cells(cells, "^ct-9b-mtp3$")
    assert [(cell.name, cell.users) for cell in chosen] == [
        ("ct-9b", ()),
        ("ct-9b-mtp3", (8, 32)),
    ]
    assert [cell.name for cell in select_cells(cells, "naive")] == ["ct-9b-naive"]
    assert select_cells(cells, "") == cells
    for pattern, reason in (("zebra", "no cell matches"), ("(", "not a regular expression")):
        with pytest.raises(ValueError, match=reason):
            select_cells(cells, pattern)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ([], "no cells"),
        ([PLAIN, PLAIN], "two cells"),
        ([DRAFTS], "no oracle"),
        ([PLAIN, replace(DRAFTS, env={"VLLM_B70": "0"})], "no oracle"),
        ([PLAIN, replace(DRAFTS, serve_args=("--enforce-eager",))], "no oracle"),
        ([replace(PLAIN, format="awq")], "unknown checkpoint"),  # type: ignore[arg-type]
        ([replace(PLAIN, shape="1b")], "unknown checkpoint"),  # type: ignore[arg-type]
        ([replace(PLAIN, depth=-1)], "depth -1"),
        ([replace(PLAIN, schedule=[[1, 2, 3]])], "schedule"),
        ([replace(PLAIN, users=(7,))], "cannot reach 7"),
        ([PLAIN, replace(DRAFTS, users=())], "no levels"),
        ([PLAIN, replace(DRAFTS, replica_of="nobody")], "no cell 'nobody'"),
        ([PLAIN, replace(DRAFTS, replica_of="plain", users=(2,))], "not configured as plain"),
        ([PLAIN, DRAFTS, replace(DRAFTS, name="b", replica_of="drafts", users=(2,))], "levels"),
    ],
)
def test_matrices_that_prove_nothing_are_refused(cells: list[Cell], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_cells(cells, 6)


def test_more_users_than_the_server_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 32"):
        check_cells([replace(PLAIN, users=(33,))], 36)


def test_ordinary_tokens_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"vocab_size": 1000}')
    assert token_range(tmp_path) == (1, 992)
    config.write_text('{"text_config": {"vocab_size": 500}}')
    assert token_range(tmp_path) == (1, 492)
    for bad in ("{}", "[]", '{"vocab_size": 5}', "{"):
        config.write_text(bad)
        with pytest.raises(HarnessError):
            token_range(tmp_path)


def test_results_are_written_before_the_first_server(
    run: Run, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        assert steps() == []
        raise ValueError("stop here")

    monkeypatch.setattr(quickstart, "make_prompts", refuse)
    assert run([PLAIN]) == ExitCode.BAD_INPUT
