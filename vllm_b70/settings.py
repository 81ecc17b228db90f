"""Every switch of the plugin, read once from the environment into one frozen object.

Standard library only: this module is imported in every vLLM process, also where the plugin is off.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """A ``VLLM_B70*`` variable has a value that is not allowed."""


def _switch(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise SettingsError(f"{name}={value!r} is not allowed: use 1 (on) or 0 (off).")
    return value == "1"


def _one_of(*allowed: str) -> Callable[[str, str], str]:
    def parse(name: str, value: str) -> str:
        if value not in allowed:
            raise SettingsError(
                f"{name}={value!r} is not allowed: use one of {', '.join(allowed)}."
            )
        return value

    return parse


def _group(name: str, value: str) -> int:
    return int(_one_of("32", "64", "128", "256")(name, value))


def _file(name: str, value: str) -> Path:
    path = Path(value)
    if not value or not path.is_absolute():
        raise SettingsError(f"{name}={value!r} is not allowed: use the absolute path of a file.")
    if path.is_dir() or not path.parent.is_dir():
        raise SettingsError(
            f"{name}={value!r} is not allowed: its folder must exist and it must not be a folder."
        )
    return path


def _input_file(name: str, value: str) -> Path:
    path = Path(value)
    if not path.is_absolute() or not path.is_file():
        raise SettingsError(
            f"{name}={value!r} is not allowed: use the absolute path of a file that exists."
        )
    return path


@dataclass(frozen=True)
class Switch:
    """One environment variable: what it means and how its text is read."""

    field: str
    default: Any
    parse: Callable[[str, str], Any]
    meaning: str


#: The public reference of the switches, in the order in which the documentation lists them.
SWITCHES: dict[str, Switch] = {
    "VLLM_B70": Switch("enabled", False, _switch, "1 switches the deterministic route on"),
    "VLLM_B70_LINEAR": Switch(
        "linear",
        "triton",
        _one_of("triton", "native", "auto", "naive"),
        "triton: our own kernels (on a CPU they are numba's); native: the vendor's, in certified "
        "row classes; auto: the faster for each shape; naive: BLAS, the control that must fail",
    ),
    "VLLM_B70_CENSUS": Switch(
        "census",
        "strict",
        _one_of("strict", "warn", "off"),
        "strict: an op that the census at start finds inexact stops the server; warn; off",
    ),
    "VLLM_B70_GRAPHS": Switch(
        "graphs",
        None,
        _one_of("off", "target", "all"),
        "graphs of decode steps on a GPU: off; target: none for the drafter; all (unset: all where "
        "the device has graphs)",
    ),
    "VLLM_B70_STEP_TRACE": Switch(
        "step_trace",
        None,
        _file,
        "absolute path of a file that the scheduler fills anew, one JSON line a step",
    ),
    "VLLM_B70_DRAFT_HEAD": Switch(
        "draft_head",
        "int4",
        _one_of("int4", "none"),
        "int4: drafts come from a 4-bit copy of the lm_head; none: from the lm_head itself",
    ),
    "VLLM_B70_DRAFT_HEAD_GROUP": Switch(
        "draft_head_group", 128, _group, "values that share a scale in the 4-bit draft head"
    ),
    "VLLM_B70_DRAFT_SHORTLIST": Switch(
        "draft_shortlist",
        None,
        _input_file,
        "absolute path of a list of the only tokens that the 4-bit draft head scores",
    ),
    "VLLM_B70_DRAFT_LAYER": Switch(
        "draft_layer",
        "none",
        _one_of("int4", "none"),
        "int4: the MTP layer's 16-bit linears are quantised at load, for drafting alone",
    ),
}


#: Values of ``VLLM_B70_LINEAR`` that ask for the vendor's kernels.
NATIVE = ("native", "auto")


@dataclass(frozen=True)
class Settings:
    """The switches as the process found them.

    Attributes:
        enabled: The plugin's route is on.
        linear: ``triton``, ``native``, ``auto`` or ``naive`` (a control, never for serving).
        census: ``strict``, ``warn`` or ``off``.
        graphs: ``off``, ``target`` or ``all``; None leaves it to the device and to vLLM's options.
        step_trace: File for the scheduler's step trace, or None.
        draft_head: ``int4`` or ``none``.
        draft_head_group: Group size of the 4-bit draft head.
        draft_shortlist: File of the tokens that the 4-bit draft head scores, or None for all.
        draft_layer: ``int4`` or ``none``.
    """

    enabled: bool = False
    linear: str = "triton"
    census: str = "strict"
    graphs: str | None = None
    step_trace: Path | None = None
    draft_head: str = "int4"
    draft_head_group: int = 128
    draft_shortlist: Path | None = None
    draft_layer: str = "none"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read all switches.

        Args:
            environ: Mapping to read instead of ``os.environ``.

        Raises:
            SettingsError: A value is malformed or a ``VLLM_B70*`` name is unknown; the message
                gives the variable, its value and what is allowed.
        """
        environ = os.environ if environ is None else environ
        unknown = sorted(n for n in environ if n.startswith("VLLM_B70") and n not in SWITCHES)
        if unknown:
            raise SettingsError(
                f"{unknown[0]} is not a switch of vllm_b70, so nothing would read it: "
                f"unset it or use one of {', '.join(SWITCHES)}."
            )
        values = {
            switch.field: switch.parse(name, environ[name])
            for name, switch in SWITCHES.items()
            if name in environ
        }
        settings = cls(**values)
        if settings.draft_shortlist is not None and settings.draft_head == "none":
            raise SettingsError(
                "VLLM_B70_DRAFT_SHORTLIST is set, but only the 4-bit draft head reads it: unset it "
                "or set VLLM_B70_DRAFT_HEAD=int4."
            )
        return settings


@functools.cache
def current() -> Settings:
    """The switches of this process, read at the first call."""
    return Settings.from_env()


def is_on(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the main switch asks for the plugin. Malformed values count as on, so that the
    full reading, which refuses them, is reached."""
    environ = os.environ if environ is None else environ
    return environ.get("VLLM_B70", "0") != "0"
