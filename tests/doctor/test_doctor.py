"""Each group of checks on machines made up for it; kept outputs of real ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_b70.checkpoints.tiny import make_tiny
from vllm_b70.cli import app
from vllm_b70.doctor import devices, environment, memory, plugin, report, software
from vllm_b70.doctor.finding import Finding, Severity

OUTPUTS = Path(__file__).parent / "outputs"


def by_name(findings):
    return {finding.what: finding for finding in findings}


@pytest.fixture
def settings(monkeypatch):
    """An environment without a variable of vLLM's or ours."""
    import os

    for name in list(os.environ):
        if name.startswith("VLLM_") or name == "TRITON_INTERPRET":
            monkeypatch.delenv(name)
    return monkeypatch


def test_nothing_heavy_is_imported_to_show_the_help():
    code = "import sys, vllm_b70.cli; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("severities", "status"),
    [(["ok", "note"], 0), (["ok", "warning", "note"], 1), (["error", "warning"], 2)],
)
def test_the_exit_status_is_that_of_the_worst(severities, status, monkeypatch):
    findings = [Finding("g", "w", Severity(s), "found") for s in severities]
    monkeypatch.setattr(report, "examine", lambda *arguments: findings)
    for arguments in ([], ["--json"]):
        assert CliRunner().invoke(app, ["doctor", *arguments]).exit_code == status
    result = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert [f["severity"] for f in result["findings"]] == severities


@pytest.mark.parametrize(("version", "severity"), [("0.32.1+xpu", "ok"), ("0.31.9", "error")])
def test_vllm_against_the_supported_range(version, severity, monkeypatch):
    monkeypatch.setattr(software, "installed_vllm", lambda: version)
    found = by_name(software.check())["vllm"]
    assert found.severity == severity and version in found.found and "0.32.x" in found.found


def test_ipex_is_reported(monkeypatch):
    versions = {"intel-extension-for-pytorch": "2.8.10+xpu", "torch": "2.11"}
    monkeypatch.setattr(software, "version_of", versions.get)
    found = by_name(software.check())["intel-extension-for-pytorch"]
    assert found.severity == "warning" and "2.8.10+xpu" in found.found


def test_every_switch_says_its_source_and_its_readers(settings):
    settings.setenv("VLLM_B70", "1")
    settings.setenv("VLLM_B70_LINEAR", "naive")
    found = by_name(environment.check("cpu"))
    assert found["VLLM_B70"].found == "True, from the environment; read by plugin"
    linear = found["VLLM_B70_LINEAR"].found
    assert linear.startswith("naive, from the environment; read by ") and "platform" in linear
    assert "from the default" in found["VLLM_B70_STEP_TRACE"].found
    assert all(f.severity == "ok" for f in found.values())


def test_a_switch_that_nothing_reads_is_a_warning(settings):
    settings.setattr(environment, "readers_of", lambda field: [])
    assert by_name(environment.check("cpu"))["VLLM_B70_LINEAR"].severity == "warning"


def test_every_switch_has_a_reader():
    from vllm_b70.settings import SWITCHES

    for switch in SWITCHES.values():
        assert environment.readers_of(switch.field), switch.field
    assert environment.readers_of("no_such_switch") == []


@pytest.mark.parametrize(
    ("name", "value", "device", "severity"),
    [
        ("VLLM_B70_NO_SUCH", "1", "cpu", "error"),
        ("VLLM_B70_LINEAR", "fast", "cpu", "error"),
        ("VLLM_XPU_GDN_SPLIT_MIXED", "1", "cpu", "warning"),
        ("TRITON_INTERPRET", "1", "xpu", "error"),
        ("ONEAPI_DEVICE_SELECTOR", "opencl:0", "xpu", "error"),
        ("ONEAPI_DEVICE_SELECTOR", "level_zero:0", "xpu", "ok"),
    ],
)
def test_a_variable_that_does_not_do_what_it_says(name, value, device, severity, settings):
    pytest.importorskip("vllm")
    settings.setenv(name, value)
    found = [f for f in environment.check(device) if name in f.what + f.found]
    assert [f.severity for f in found] == [severity]


@pytest.mark.parametrize(
    ("listed", "severity"), [(None, "ok"), ("vllm_b70", "ok"), ("other", "error"), ("", "error")]
)
def test_a_list_of_plugins_without_ours(listed, severity, settings):
    settings.setattr(plugin, "_start", lambda: Finding("plugin", "start", Severity.ok, ""))
    if listed is not None:
        settings.setenv("VLLM_PLUGINS", listed)
    found = by_name(plugin.check())
    assert found["VLLM_PLUGINS"].severity == severity
    assert found["vllm.general_plugins"].severity == "ok"


def test_a_plugin_that_is_not_installed(settings):
    settings.setattr(plugin, "_start", lambda: Finding("plugin", "start", Severity.ok, ""))
    settings.setattr(plugin.metadata, "entry_points", lambda group: [])
    assert by_name(plugin.check())["vllm.platform_plugins"].severity == "error"


#: A model whose sizes are easy to work out.
CONFIG = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    ("load", "kv", "state"),
    [
        # keys and values x 16 bits x 4 heads x 256 a token and layer
        ((1, 0, 1000, 1), 2 * 2 * 4 * 256 * 1000, 3 * (4 * 32 * 128 * 128 + 2 * 8192 * 3)),
        ((5, 0, 1000, 2), 5 * 2 * 2 * 2 * 256 * 1000, 5 * 3 * (4 * 16 * 128 * 128 + 2 * 4096 * 3)),
        # the draft layer has keys and values too; four slots a user, histories of 6
        ((2, 3, 10, 1), 2 * 2 * 2 * 2 * 4 * 256 * 10, 8 * 3 * (4 * 32 * 128 * 128 + 2 * 8192 * 6)),
    ],
)
def test_bytes_of_caches(load, kv, state):
    load = memory.Load(*load)
    assert memory.kv_bytes(CONFIG, load) == kv
    assert memory.state_bytes(CONFIG, load) == state


@pytest.mark.parametrize(
    ("free", "users", "severity"), [(2**34, 1, "ok"), (2**28, 1, "ok"), (2**28, 10000, "error")]
)
def test_a_model_against_the_free_memory(free, users, severity, tmp_path, monkeypatch):
    make_tiny(tmp_path / "model", format="ct", shape="9b")
    monkeypatch.setattr(memory, "free_memory", lambda kind: [(free, free)] * 2)
    found = by_name(memory.check(tmp_path / "model", memory.Load(users, 3, 512, 1)))
    assert found["fits"].severity == severity and found["checkpoint"].severity == "ok"


def test_a_checkpoint_that_cannot_be_served(tmp_path, monkeypatch):
    make_tiny(tmp_path / "model", format="ct", shape="9b", mtp=False)
    found = by_name(memory.check(tmp_path / "model", memory.Load(1, 3, 512, 1)))
    assert found["MTP head"].severity == "error"
    assert (
        by_name(memory.check(tmp_path, memory.Load(1, 0, 1, 1)))["checkpoint"].severity == "error"
    )


def test_a_machine_without_a_card(monkeypatch):
    monkeypatch.setattr(devices, "kind", lambda: "cpu")
    found = by_name(devices.check(1))
    assert "GiB free" in found["cpu"].found and found["cards"].severity == "note"
    assert found["level-zero loader"].severity in ("ok", "note")


@pytest.mark.parametrize("file", sorted(OUTPUTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_kept_output_is_still_of_this_form(file):
    """Of the machines named in docs/b70.md; a change of the form asks for new ones."""
    kept = json.loads(file.read_text())
    findings = [
        Finding(**{**finding, "severity": Severity(finding["severity"])})
        for finding in kept["findings"]
    ]
    assert report.worst(findings) == kept["worst"]
    assert json.loads(json.dumps(report.as_json(findings))) == kept
    assert {f.group for f in findings} == {"software", "devices", "environment", "plugin"}
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(report.as_table(findings))
    text = console.export_text()
    assert all(finding.what in text for finding in findings)
