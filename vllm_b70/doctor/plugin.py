"""Whether vLLM will find the plugin in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

from vllm_b70.doctor.finding import Finding, Severity

GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
#: What each process of a server does first.
START = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.platforms import current_platform
print("PLATFORM", type(current_platform).__name__)
"""


def check() -> Iterator[Finding]:
    """The entry points, what may keep them out, and a process that starts with the plugin on."""

    def found(what: str, severity: Severity, text: str, remedy: str = "") -> Finding:
        return Finding("plugin", what, severity, text, remedy)

    for group in GROUPS:
        points = list(metadata.entry_points(group=group))
        ours = [point for point in points if point.name == "vllm_b70"]
        others = sorted(point.name for point in points if point.name != "vllm_b70")
        text = f"{len(ours)} of vllm_b70" + (f", others: {', '.join(others)}" if others else "")
        rival = bool(others) and group == "vllm.platform_plugins"
        yield found(
            group,
            Severity.error if len(ours) != 1 else Severity.warning if rival else Severity.ok,
            text,
            "install vllm-b70 once"
            if len(ours) != 1
            else "vLLM takes one platform of another package only: uninstall the other"
            if rival
            else "",
        )
    listed = os.environ.get("VLLM_PLUGINS")
    out = listed is not None and "vllm_b70" not in listed.split(",")
    yield found(
        "VLLM_PLUGINS",
        Severity.error if out else Severity.ok,
        "not set, so all load" if listed is None else listed or "empty, so none loads",
        "add vllm_b70 or unset it" if out else "",
    )
    yield _start()


def _start() -> Finding:
    run = subprocess.run(
        [sys.executable, "-c", START],
        env=os.environ | {"VLLM_B70": "1"},
        capture_output=True,
        text=True,
    )
    named = [line.split()[1] for line in run.stdout.splitlines() if line[:8] == "PLATFORM"]
    if run.returncode == 0 and named and named[0].startswith("B70"):
        return Finding("plugin", "a process with VLLM_B70=1", Severity.ok, named[0])
    last = (run.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(
        "plugin",
        "a process with VLLM_B70=1",
        Severity.error,
        f"{named[0] if named else 'stops'}: {last}",
        "follow the sentence",
    )
