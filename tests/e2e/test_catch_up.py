"""After steps that left the draft layer out, its cache and its drafts are as if none had; and a
crowd that holds few state slots, is preempted and resumed has the tokens of each alone."""

import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def runs(catch_up_runs):
    return catch_up_runs


def test_steps_were_skipped_and_caught_up(runs):
    assert runs["skipped"]["skipped"] > 50 and runs["skipped"]["replayed"] > 50


def test_the_draft_layers_cache_is_that_of_a_run_without_skipping(runs):
    assert runs["skipped"]["cache_is_off_by"] == 0 < runs["missing"]["cache_is_off_by"]


def test_the_first_drafts_agree(runs):
    assert runs["skipped"]["drafts"] == runs["never"]["drafts"]
    assert runs["skipped"]["acceptance"] == runs["never"]["acceptance"]


def test_without_catching_up_acceptance_falls(runs):
    """If this fails the checkpoint's drafts do not need the cache, and the above shows little."""
    assert runs["missing"]["acceptance"] < runs["skipped"]["acceptance"] - 0.1


def test_no_token_depends_on_any_of_it(runs):
    assert runs["no drafts"]["acceptance"] is None
    for name in ("never", "skipped", "missing"):
        assert runs[name]["tokens"] == runs["no drafts"]["tokens"]


def test_a_crowd_has_the_tokens_of_each_alone(runs):
    assert runs["crowd"]["preempted"] > 0 and runs["alone"]["preempted"] == 0
    assert runs["crowd"]["tokens"] == runs["alone"]["tokens"]


def test_a_crowd_holds_few_state_slots(runs):
    requests, slots = runs["crowd"]["held"]
    assert requests == 8 and slots == 8 + 3, "a slot each and three drafts of the first"
    assert runs["alone"]["held"] == [1, 4]


def test_depths_are_counted(runs):
    counts = {name.removeprefix("vllm_b70:"): n for name, n in runs["counts"].items()}
    assert counts["draft_layer_skipped_steps_total"] > 50
    assert counts["draft_layer_caught_up_steps_total"] > 1
    for depth in "03":
        assert counts[f"draft_depth_steps_total|{depth}|schedule"] > 10
    drafts = counts["drafts_total|3"]
    accepted = [counts[f"accepted_draft_tokens_total|3|{position}"] for position in "012"]
    assert drafts >= accepted[0] >= accepted[1] >= accepted[2] > 0
