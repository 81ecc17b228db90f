"""``vllm-b70 depth tune`` against fake servers."""

import json

import pytest
from typer.testing import CliRunner

from vllm_b70.cli import app
from vllm_b70.harness import depth_tune


def run(*arguments):
    return CliRunner().invoke(app, ["depth", "tune", *map(str, arguments)])


def test_running_servers_are_measured(fake, tmp_path):
    out = tmp_path / "out.json"
    without = fake()
    result = run(
        "--url", f"0={without.base_url}", "--served", "tiny", "--users", "1,3", "--tokens", 4,
        "--prompt-tokens", 5, "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "num_speculative_tokens_per_batch_size: [[1, 3, 0]]" in result.output
    written = json.loads(out.read_text())
    assert [(m["depth"], m["users"]) for m in written["measurements"]] == [(0, 1), (0, 3)]
    assert all(m["tokens_per_s"] > 0 for m in written["measurements"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give a checkpoint to serve, or --url"),
        (("model", "--url", "0=http://x"), "give a checkpoint to serve, or --url"),
        (("--url", "http://x"), "is not DEPTH=ADDRESS"),
        (("model", "--users", "1,x"), "not numbers separated by commas"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, reason):
    result = run(*arguments)
    assert result.exit_code == 2 and reason in " ".join(result.output.split())


def test_a_plot_without_matplotlib_is_refused_first(monkeypatch):
    monkeypatch.setattr(depth_tune.importlib.util, "find_spec", lambda name: None)
    result = run("model", "--plot", "x.png")
    assert result.exit_code == 2 and "vllm-b70[report]" in " ".join(result.output.split())


def test_a_server_of_another_depth_is_noticed(fake):
    result = run("--url", f"3={fake().base_url}", "--served", "tiny", "--users", "1", "--tokens", 4)
    assert result.exit_code == 2
    assert "num_speculative_tokens=3 and no schedule" in " ".join(result.output.split())


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from vllm_b70.harness.depth_model import DepthModel, Measurement

    model = DepthModel([Measurement(0, 1, 5.0), Measurement(0, 8, 20.0)])
    depth_tune.draw(model, [1, 8], tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
