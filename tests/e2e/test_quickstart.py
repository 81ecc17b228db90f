"""The main job as a user runs it: real servers, the whole default matrix and its controls."""

import json
import subprocess

import pytest

pytestmark = pytest.mark.e2e

MINUTES = 60  # seconds


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    results = folder / "results.json"
    command = ["vllm-b70", "quickstart", "--control", "--workdir", str(folder / "work")]
    run = subprocess.run([*command, "--results", str(results)], timeout=25 * MINUTES)
    record = json.loads(results.read_text())
    assert record["versions"]["vllm"].startswith("0.32")
    assert run.returncode == 0, [step["failures"] for step in record["steps"] if step["failures"]]
    return record["steps"]


def of(steps, name, mode="exact"):
    return {step["users"]: step for step in steps if (step["name"], step["mode"]) == (name, mode)}


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("ct-9b", {8, 16, 32}),
        ("ct-9b-mtp3", {8, 32}),
        ("gptq-27b", {8, 16, 32}),
        ("gptq-27b-replica", {32}),
        ("gptq-27b-mtp3", {8, 32}),
        ("gptq-27b-schedule", {8, 32}),
    ],
)
def test_no_sequence_differs(steps, name, levels):
    found = of(steps, name)
    assert set(found) == levels
    for users, step in found.items():
        assert step["sequences"] >= 32 and step["mismatches"] == 0
        assert step["logprob_mismatches"] == 0, "the promise covers the logprobs' bits"
        assert step["max_running"] == users


@pytest.mark.parametrize("name", ["ct-9b-mtp3", "gptq-27b-schedule", "gptq-27b-mtp3"])
def test_speculation_was_neither_all_accepted_nor_all_refused(steps, name):
    for step in of(steps, name).values():
        if step["acceptance"] is not None:
            assert 0.05 < step["acceptance"] < 0.95
            assert all(0 < share < 1 for share in step["acceptance_per_position"])
    assert of(steps, name)[8]["acceptance"] is not None


def test_the_schedule_changed_the_width(steps):
    widths = of(steps, "gptq-27b-schedule")[32]
    assert {"1", "2", "4"} <= set(widths["width_steps"]) and widths["width_changes"] > 0


def test_two_servers_with_empty_caches_agree(steps):
    first, second = of(steps, "gptq-27b")[32], of(steps, "gptq-27b-replica")[32]
    assert first["token_hash"] == second["token_hash"]


@pytest.mark.parametrize("name", ["ct-9b-naive", "bf16-9b-stock-mtp3"])
def test_the_controls_differ(steps, name):
    assert sum(step["mismatches"] for step in of(steps, name, "control").values()) > 0
