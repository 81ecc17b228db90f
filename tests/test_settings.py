"""Every switch: defaults, good values, and the sentence a bad value gets."""

import dataclasses

import pytest

from vllm_b70.settings import SWITCHES, Settings, SettingsError, is_on


def test_defaults_are_off():
    assert Settings.from_env({}) == Settings(
        enabled=False, linear="triton", census="strict", step_trace=None
    )


def test_every_switch_has_a_field_and_the_documented_default():
    fields = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert {switch.field: switch.default for switch in SWITCHES.values()} == fields


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().enabled = True  # type: ignore[misc]


def test_good_values(tmp_path):
    settings = Settings.from_env(
        {
            "VLLM_B70": "1",
            "VLLM_B70_LINEAR": "naive",
            "VLLM_B70_CENSUS": "warn",
            "VLLM_B70_GRAPHS": "target",
            "VLLM_B70_STEP_TRACE": str(tmp_path / "trace.jsonl"),
            "VLLM_B70_DRAFT_HEAD_GROUP": "32",
            "VLLM_B70_DRAFT_LAYER": "int4",
            "VLLM_PLUGINS": "other",
        }
    )
    assert settings == Settings(
        True,
        "naive",
        "warn",
        "target",
        tmp_path / "trace.jsonl",
        draft_head_group=32,
        draft_layer="int4",
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("VLLM_B70", "yes", "1 (on) or 0 (off)"),
        ("VLLM_B70", "", "1 (on) or 0 (off)"),
        ("VLLM_B70", "01", "1 (on) or 0 (off)"),
        ("VLLM_B70_LINEAR", "fast", "triton, native, auto, naive"),
        ("VLLM_B70_LINEAR", "", "triton, native, auto, naive"),
        ("VLLM_B70_CENSUS", "1", "strict, warn, off"),
        ("VLLM_B70_GRAPHS", "", "off, target, all"),
        ("VLLM_B70_STEP_TRACE", "", "absolute path"),
        ("VLLM_B70_STEP_TRACE", "trace.jsonl", "absolute path"),
        ("VLLM_B70_STEP_TRACE", "/nonexistent-folder/trace", "folder must exist"),
        ("VLLM_B70_STEP_TRACE", "/", "folder"),
        ("VLLM_B70_DRAFT_HEAD", "int8", "int4, none"),
        ("VLLM_B70_DRAFT_HEAD_GROUP", "100", "32, 64, 128, 256"),
        ("VLLM_B70_DRAFT_LAYER", "", "int4, none"),
        ("VLLM_B70_DRAFT_SHORTLIST", "list", "absolute path"),
        ("VLLM_B70_DRAFT_SHORTLIST", "/nonexistent", "a file that exists"),
    ],
)
def test_malformed_values_name_variable_value_and_what_is_allowed(name, value, allowed):
    with pytest.raises(SettingsError) as error:
        Settings.from_env({name: value})
    assert name in str(error.value) and repr(value) in str(error.value)
    assert allowed in str(error.value)


def test_a_shortlist_without_the_head_that_reads_it(tmp_path):
    (tmp_path / "list").touch()
    environ = {"VLLM_B70_DRAFT_SHORTLIST": str(tmp_path / "list"), "VLLM_B70_DRAFT_HEAD": "none"}
    with pytest.raises(SettingsError, match="set VLLM_B70_DRAFT_HEAD=int4"):
        Settings.from_env(environ)


def test_an_unknown_switch_is_refused_because_nothing_would_read_it():
    with pytest.raises(SettingsError, match="VLLM_B70_LINAER is not a switch"):
        Settings.from_env({"VLLM_B70_LINAER": "triton"})


@pytest.mark.parametrize(
    ("environ", "on"),
    [({}, False), ({"VLLM_B70": "0"}, False), ({"VLLM_B70": "1"}, True), ({"VLLM_B70": "x"}, True)],
)
def test_is_on(environ, on):
    assert is_on(environ) is on
