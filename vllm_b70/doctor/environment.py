"""Environment variables: the plugin's switches, Intel's, and those that nothing reads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from vllm_b70.doctor.finding import Finding, Severity
from vllm_b70.settings import SWITCHES, Settings, SettingsError

#: What oneAPI and oneCCL read; the latter belong to two cards.
INTEL = (
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
    "CCL_ATL_TRANSPORT",
    "CCL_ZE_IPC_EXCHANGE",
    "CCL_TOPO_P2P_ACCESS",
    "CCL_ROOT",
    "FI_PROVIDER",
    "ONEAPI_ROOT",
)


def check(device: str) -> Iterator[Finding]:
    """Everything that the environment says to a server on a device of this kind."""
    yield from _switches()
    yield from _unread()
    if os.environ.get("TRITON_INTERPRET") == "1" and device != "cpu":
        yield Finding(
            "environment",
            "TRITON_INTERPRET",
            Severity.error,
            "1: kernels would run in Python",
            "unset it",
        )
    if device != "xpu":
        return
    for name in INTEL:
        value = os.environ.get(name)
        finding = Finding("environment", name, Severity.ok, value or "not set")
        if name == "ONEAPI_DEVICE_SELECTOR" and value and "level_zero" not in value:
            finding = Finding(
                "environment", name, Severity.error, value, "torch needs level_zero: unset it"
            )
        yield finding


def _switches() -> Iterator[Finding]:
    try:
        settings = Settings.from_env()
    except SettingsError as error:
        yield Finding("environment", "VLLM_B70*", Severity.error, str(error), "correct it")
        return
    for name, switch in SWITCHES.items():
        source = "the environment" if name in os.environ else "the default"
        readers = readers_of(switch.field)
        read = f"read by {', '.join(readers)}" if readers else "nothing reads it"
        off = name == "VLLM_B70" and not settings.enabled
        yield Finding(
            "environment",
            name,
            Severity.note if off else Severity.ok if readers else Severity.warning,
            f"{getattr(settings, switch.field)}, from {source}; {read}",
            "set it to 1 to serve by the exact route" if off else "",
        )


def readers_of(field: str) -> list[str]:
    """Modules of the plugin whose source reads a field of ``Settings``; found by looking."""
    package = Path(__file__).parents[1]
    if field == "enabled":
        pattern = re.compile(r"\bis_on\(\)")
    else:
        pattern = re.compile(rf"\b(?:settings|current\(\))\.{field}\b")
    own = {package / "settings.py", *Path(__file__).parent.iterdir()}
    return [
        str(path.relative_to(package).with_suffix("")).replace(os.sep, ".")
        for path in sorted(package.rglob("*.py"))
        if path not in own and pattern.search(path.read_text(encoding="utf-8"))
    ]


def _unread() -> Iterator[Finding]:
    """``VLLM_*`` variables that vLLM does not know; the plugin refuses such names of its own."""
    asked = sorted(n for n in os.environ if n.startswith("VLLM_") and n not in SWITCHES)
    try:
        from vllm.envs import environment_variables
    except ImportError as error:
        yield Finding(
            "environment", "VLLM_*", Severity.note, f"not looked at: no vLLM ({error})", ""
        )
        return
    unknown = [n for n in asked if n not in environment_variables and "VLLM_B70" not in n]
    for name in unknown:
        yield Finding(
            "environment", name, Severity.warning, "this vLLM does not read it", "unset it"
        )
    known = [f"{name}={os.environ[name]}" for name in asked if name in environment_variables]
    yield Finding("environment", "VLLM_*", Severity.ok, ", ".join(known) or "none set")
