"""``vllm-b70 census``: what it prints, its exit status, and that its help imports nothing heavy."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_b70.census import command
from vllm_b70.cli import app


def certificate(exact):
    pytest.importorskip("vllm")
    from vllm_b70.census.certificate import Certificate
    from vllm_b70.census.verdict import Verdict

    verdict = Verdict("linear", "8x8", exact, "" if exact else "5-8 rows", "1-32", 90, 0.25)
    return Certificate({"device": {"name": "some card"}}, (verdict,), 1.25)


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    for name in ("VLLM_B70", "VLLM_B70_CENSUS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "x")


@pytest.mark.parametrize(("exact", "status"), [(True, 0), (False, 1)])
def test_table_certificate_and_status(exact, status, monkeypatch, tmp_path):
    asked = []

    def take(*arguments):
        asked.append(arguments)
        return certificate(exact)

    monkeypatch.setattr(command, "_take", take)
    output = tmp_path / "census.json"
    arguments = ["census", "--model", "m", "--json", str(output), "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--", "--max-num-seqs", "4"])
    assert result.exit_code == status, result.output
    assert asked == [("m", ["--max-num-seqs", "4"], "cpu")]
    for part in ("linear", "8x8", "1-32", "90", "0.25", f"{int(exact)} of 1 exact on some card"):
        assert part in result.output
    assert ("DIFFERS: 5-8 rows" in result.output) is not exact
    assert json.loads(output.read_text())["ops"][0]["exact"] is exact


def test_what_stops_it_is_one_sentence(monkeypatch):
    def take(*arguments):
        raise ValueError("no such model [x]")

    monkeypatch.setattr(command, "_take", take)
    result = CliRunner().invoke(app, ["census", "--model", "m"])
    assert result.exit_code == 2 and "vllm-b70: no such model [x]" in result.output


def test_another_kind_of_device_is_refused():
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    other = "xpu" if current_platform.device_type != "xpu" else "cpu"
    with pytest.raises(ValueError, match=f"not for {other}"):
        command._take("m", [], other)


def test_help_imports_neither_vllm_nor_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from vllm_b70.cli import app\n"
        "assert '--model' in CliRunner().invoke(app, ['census', '--help']).output\n"
        "print([m for m in ('vllm', 'torch') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stderr[-1000:]
