"""The V2 runner with its graphs: after skipped steps the draft layer's cache and drafts are as if
none had been skipped. About a minute: one engine of tests/e2e/catch_up_engine.py."""

import pytest


@pytest.fixture(scope="module")
def runs(catch_up_runs):
    return catch_up_runs


def test_the_cache_and_the_first_drafts(runs):
    assert runs["skipped"]["skipped"] > 50 and runs["skipped"]["replayed"] > 50
    assert runs["skipped"]["cache_is_off_by"] <= 1e-3 < runs["missing"]["cache_is_off_by"]
    assert runs["skipped"]["drafts"] == runs["never"]["drafts"]


def test_without_catching_up_acceptance_falls(runs):
    assert runs["missing"]["acceptance"] < runs["skipped"]["acceptance"] - 0.1


def test_no_token_depends_on_any_of_it(runs):
    for name in ("never", "skipped", "missing"):
        assert runs[name]["tokens"] == runs["no drafts"]["tokens"]
