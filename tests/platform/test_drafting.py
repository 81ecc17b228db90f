"""The policy on drafting: rows of logits only where they are needed, and whose shortlist it is."""

import types

import pytest
from tokenizers import Tokenizer

pytest.importorskip("vllm")
from vllm.config import SpeculativeConfig

from vllm_b70 import platform
from vllm_b70.checkpoints.tiny import make_tiny
from vllm_b70.settings import Settings
from vllm_b70.speculation import shortlist


def config(model="model", speculative=True, **change):
    given = {"draft_sample_method": "greedy", "enable_adaptive_verification": False}
    given["num_speculative_tokens_per_batch_size"] = None
    drafting = types.SimpleNamespace(use_local_argmax_reduction=False, **given | change)
    return types.SimpleNamespace(
        speculative_config=drafting if speculative else None,
        model_config=types.SimpleNamespace(
            tokenizer=str(model), tokenizer_revision=None, get_vocab_size=lambda: 1024
        ),
    )


@pytest.fixture
def settings(monkeypatch):
    def use(**chosen):
        monkeypatch.setattr(platform, "current", lambda: Settings(enabled=True, **chosen))

    use()
    return use


@pytest.mark.parametrize(
    ("change", "without_logits"),
    [
        ({}, True),
        ({"draft_sample_method": "probabilistic"}, False),
        ({"enable_adaptive_verification": True}, False),
    ],
)
def test_rows_of_logits_are_made_where_something_needs_them(change, without_logits):
    """vLLM refuses the reduction together with either."""
    c = config(**change)
    platform._draft_without_logits(c)
    assert c.speculative_config.use_local_argmax_reduction is without_logits
    platform._draft_without_logits(config(speculative=False))


def test_the_fields_exist():
    names = set(SpeculativeConfig.__dataclass_fields__)
    assert {"use_local_argmax_reduction", "draft_sample_method"} <= names
    assert "enable_adaptive_verification" in names


@pytest.fixture
def listed(tmp_path):
    make_tiny(tmp_path / "model", format="bf16", shape="9b")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    path = tmp_path / "list"
    shortlist.write(path, tokenizer, [5, *shortlist.special_ids(tokenizer)])
    return path


def test_a_list_for_this_model_is_accepted(listed, settings):
    settings(draft_shortlist=listed)
    platform._check_shortlist(config(listed.parent / "model"))


def test_a_list_for_another_tokenizer_stops_the_start(listed, settings):
    file = listed.parent / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace('"<|reserved_300|>"', '"<|renamed|>"'))
    settings(draft_shortlist=listed)
    with pytest.raises(shortlist.ShortlistError, match="line 1: .* another tokenizer"):
        platform._check_shortlist(config(listed.parent / "model"))
    # Nothing drafts, so nothing would read it.
    platform._check_shortlist(config(listed.parent / "model", speculative=False))


def test_a_tokenizer_that_cannot_be_read(listed, settings):
    (listed.parent / "model" / "tokenizer.json").write_text("{")
    settings(draft_shortlist=listed)
    with pytest.raises(platform.PolicyError, match="cannot be read") as refused:
        platform._check_shortlist(config(listed.parent / "model"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("chosen", "speculative", "rows"),
    [
        ({}, False, {"drafting": "none"}),
        ({}, True, {"draft head": "int4, group 128", "draft layer": "as loaded"}),
        (
            {"draft_head": "none", "draft_layer": "int4"},
            True,
            {"draft head": "lm_head itself", "draft layer": "int4"},
        ),
    ],
)
def test_the_table_says_how_drafts_are_made(chosen, speculative, rows, settings):
    settings(**chosen)
    found = platform._drafting(config(speculative=speculative))
    assert {row.setting: row.value for row in found} == rows
