"""The two entry points. Importing this module imports only the standard library.

vLLM calls ``platform`` when it resolves ``current_platform`` and ``register`` in every process
(API server, engine core, workers, model inspection). vLLM swallows an exception of a platform
plugin, so ``register`` is where a plugin that is on but cannot do its work stops the server.
"""

from __future__ import annotations

from vllm_b70.settings import SWITCHES, current, is_on

#: Our platform class for each device that vLLM may be built for.
PLATFORMS = {
    "cpu": "vllm_b70.platform.B70CpuPlatform",
    "cuda": "vllm_b70.platform.B70CudaPlatform",
    "xpu": "vllm_b70.platform.B70XpuPlatform",
}


class PluginError(RuntimeError):
    """The plugin is on but its route cannot be honoured."""


_registered = False


def registered() -> bool:
    """Whether ``register`` has run in this process with the plugin on."""
    return _registered


def platform() -> str | None:
    """Entry point of ``vllm.platform_plugins``.

    Returns:
        The qualified name of our platform class, or None when the plugin is off or vLLM was not
        built for a device that has an exact route.
    """
    if not is_on():
        return None
    from vllm.platforms import builtin_platform_plugins

    from vllm_b70.compat.versions import check_vllm_version

    check_vllm_version()
    for device, name in PLATFORMS.items():
        if builtin_platform_plugins[device]() is not None:
            return name
    return None


def register() -> None:
    """Entry point of ``vllm.general_plugins``; safe to call more than once.

    Raises:
        SettingsError: A switch is malformed.
        PluginError: The plugin is on and the vLLM version, the platform or a seam does not fit.
    """
    import os

    if "VLLM_B70" not in os.environ:
        return
    _register_names()
    global _registered
    if not is_on() or _registered:
        return
    settings = current()

    from vllm_b70.compat.versions import check_vllm_version

    check_vllm_version()
    _check_platform()

    from vllm_b70 import layers
    from vllm_b70.compat import auto_round, mtp_head, seams

    seams.require(*(name for name, seam in seams.SEAMS.items() if not seam.worker))
    mtp_head.apply()
    auto_round.apply()
    layers.register(settings)
    _registered = True


def _register_names() -> None:
    """Tell vLLM our variable names: unknown ``VLLM_*`` names are warned of, and the values then
    also enter the key of vLLM's compile cache."""
    import os

    import vllm.envs as envs

    for name, switch in SWITCHES.items():
        envs.environment_variables.setdefault(
            name, lambda name=name, default=switch.default: os.environ.get(name, default)
        )


def _check_platform() -> None:
    from vllm.platforms import current_platform

    if getattr(current_platform, "vllm_b70", False):
        return
    raise PluginError(
        f"VLLM_B70=1 but vLLM runs on {type(current_platform).__name__}, not on the plugin's "
        "platform: this version of vllm_b70 has an exact route for vLLM's CPU, CUDA and XPU builds "
        "where their device is found, and VLLM_TARGET_DEVICE=cpu or a VLLM_PLUGINS list without "
        "vllm_b70 keeps the plugin out; see `vllm-b70 doctor`, unset those variables, or set "
        "VLLM_B70=0 to serve without the guarantee."
    )
