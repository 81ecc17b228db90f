"""The V2 runner with its graphs: after skipped steps the draft layer's cache and drafts are as if
none had been skipped. About a minute: one engine of tests/e2e/catch_up_engine.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "e2e" / "catch_up_engine.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    model = tmp_path_factory.mktemp("catch_up") / "model"
    command = [sys.executable, str(SCRIPT), str(model)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, run.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT"))


def test_the_cache_and_the_first_drafts(runs):
    assert runs["skipped"]["skipped"] > 50 and runs["skipped"]["replayed"] > 50
    assert runs["skipped"]["cache_is_off_by"] <= 1e-3 < runs["missing"]["cache_is_off_by"]
    assert runs["skipped"]["drafts"] == runs["never"]["drafts"]


def test_without_catching_up_acceptance_falls(runs):
    assert runs["missing"]["acceptance"] < runs["skipped"]["acceptance"] - 0.1


def test_no_token_depends_on_any_of_it(runs):
    for name in ("never", "skipped", "missing"):
        assert runs[name]["tokens"] == runs["no drafts"]["tokens"]
