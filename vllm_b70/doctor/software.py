"""Versions against those that the route was built for or tested with."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from vllm_b70.compat.versions import SUPPORTED, installed_vllm, version_of
from vllm_b70.doctor.finding import Finding, Severity

#: What else decides how a server runs; ``vllm_b70.xpu`` asks for behaviour where it can.
OTHERS = (
    "torch",
    "triton",
    "triton-xpu",
    "pytorch-triton-xpu",
    "vllm-xpu-kernels",
    "auto-round-lib",
    "numba",
    "transformers",
    "compressed-tensors",
)


def check() -> Iterator[Finding]:
    """Python, vLLM and what vLLM stands on."""

    def found(what: str, severity: Severity, text: str, remedy: str = "") -> Finding:
        return Finding("software", what, severity, text, remedy)

    yield found("python", Severity.ok, f"{platform.python_version()} on {platform.machine()}")
    yield found(
        "vllm-b70", Severity.ok, version_of("vllm-b70") or "not installed, run from sources"
    )
    supported = ", ".join(f"{minor}.x" for minor in SUPPORTED)
    try:
        vllm = installed_vllm()
    except metadata.PackageNotFoundError:
        vllm = ""
    if vllm.startswith(tuple(f"{minor}." for minor in SUPPORTED)):
        yield found("vllm", Severity.ok, f"{vllm}; supported: {supported}")
    else:
        yield found(
            "vllm",
            Severity.error,
            f"{vllm or 'not installed'}; supported: {supported}",
            f"install vLLM {supported}",
        )
    for name in OTHERS:
        installed = version_of(name)
        if installed is not None:
            yield found(name, Severity.ok, installed)
    if version_of("torch") is None:
        yield found("torch", Severity.error, "not installed", "install the torch that vLLM pins")
    ipex = version_of("intel-extension-for-pytorch")
    if ipex is not None:
        yield found(
            "intel-extension-for-pytorch",
            Severity.warning,
            f"{ipex}; the supported vLLM versions no longer use it, and it patches torch",
            "uninstall it",
        )
