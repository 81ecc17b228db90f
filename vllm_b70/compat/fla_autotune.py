"""Patch: the chunked gated-delta-net kernels run in one configuration, not in the fastest measured.

what      the autotuners of the kernels in vllm.third_party.flash_linear_attention.ops
why       each process of vLLM picks configurations by timing, at its first call; they differ in K
          blocks and warps, so two servers, or one before and after a restart, differ in bits
upstream  not reported yet
versions  0.32
remove    when vLLM offers configurations that do not depend on timing; tests/compat fails then
"""

from __future__ import annotations

import os
from typing import Any

from vllm_b70.ops import gdn_launches, launcher, tiles

PACKAGE = "vllm.third_party.flash_linear_attention.ops"
#: Module of each kernel that prompt chunks run through.
MODULES = {
    "chunk_local_cumsum_scalar_kernel": "cumsum",
    "chunk_scaled_dot_kkt_fwd_kernel": "chunk_scaled_dot_kkt",
    "merge_16x16_to_64x64_inverse_kernel": "solve_tril",
    "recompute_w_u_fwd_kernel": "wy_fast",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "chunk_delta_h",
    "chunk_fwd_kernel_o": "chunk_o",
}

#: Variables that choose the kernels' arithmetic, and what each must be if it is set.
ARITHMETIC = {
    "FLA_TRIL_PRECISION": "ieee",
    "FLA_USE_FAST_OPS": "0",
    "FLA_USE_TMA": "0",
    "TRITON_F32_DEFAULT": "",
}


class Pinned:
    """Stands where an autotuner stood: every call runs the configuration of its shape.

    Attributes:
        autotuner: What it replaced.
        fusion: Whether the compiler may fuse a product and a sum.
    """

    def __init__(self, name: str, autotuner: Any) -> None:
        self.name, self.autotuner, self.fusion = name, autotuner, False
        self.fn, self.arg_names = autotuner.fn, autotuner.arg_names
        self._names = set(self.arg_names)
        self._chosen: dict[int, dict[str, Any]] = {}
        self._launchers: dict[tuple[Any, ...], tuple[launcher.Launcher, int]] = {}

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch the kernel; called by Triton with the arguments of the launch."""
        heads = kwargs["H"]
        if heads not in self._chosen:
            self._chosen[heads] = self._choose(heads)
        if not launcher.known() or not self._launch(args, kwargs, self._chosen[heads]):
            self.fn.run(*args, **kwargs, **self._chosen[heads], enable_fp_fusion=self.fusion)

    def _launch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: dict[str, Any]
    ) -> bool:
        """Launch at little cost to the host, if every parameter is given and nothing else."""
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs | chosen
        grid, warmup = given.pop("grid"), given.pop("warmup")
        options = {name: given.pop(name) for name in chosen.keys() - self._names}
        if warmup or given.keys() != self._names:
            return False
        values = [given[name] for name in self.arg_names]
        constants = tuple([values[i] for i in self.fn.constexprs])
        key = (kwargs["H"], self.fusion, constants)
        if key not in self._launchers:
            named = {self.arg_names[i]: values[i] for i in self.fn.constexprs}
            scalars = [i for i, v in enumerate(values) if isinstance(v, (int, float))]
            self._launchers[key] = (
                launcher.Launcher(self.fn, named | options | {"enable_fp_fusion": self.fusion}),
                min(scalars),
            )
        found, pointers = self._launchers[key]
        last = len(values) - len(constants)
        grid = grid(given) if callable(grid) else grid
        found(grid, values[:pointers], *values[pointers:last])
        return True

    def _choose(self, heads: int) -> dict[str, Any]:
        """The table's entry as the launcher takes it, if the kernel's authors tried it as well.

        Raises:
            PluginError: They did not, so the kernel is no longer the one that the table is for.
        """
        import torch

        from vllm_b70.plugin import PluginError

        kind = "xpu" if hasattr(torch, "xpu") and torch.xpu.is_available() else "cuda"
        device = torch.device(kind)
        wanted = gdn_launches.chunk(self.name, tiles.family(device), heads)
        options = tiles.grf_options(wanted.pop("grf", 0), device)
        for config in self.autotuner.configs:
            stages = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            if config.kwargs | stages == wanted:
                return wanted | options
        raise PluginError(
            f"vllm_b70 has pinned {self.name} to {wanted}, which is not a configuration of this "
            "vLLM: install a supported vLLM, or set VLLM_B70=0."
        )


def pin(module: Any, name: str) -> None:
    """Replace the autotuner of one kernel; safe to call again.

    Args:
        module: The kernel's module.
        name: Name of the kernel, one of ``gdn_launches.chunk_kernels()``.

    Raises:
        PluginError: The kernel is not heuristics over an autotuner over a compiled function.
    """
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    from vllm_b70.plugin import PluginError

    kernel: Any = getattr(module, name, None)
    inner: Any = getattr(kernel, "fn", None)
    if isinstance(inner, Pinned):
        return
    fits = (
        isinstance(kernel, Heuristics)
        and isinstance(inner, Autotuner)
        and isinstance(inner.fn, JITFunction)
        and "H" in inner.arg_names
    )
    if not fits:
        raise PluginError(
            f"vllm_b70 cannot pin {module.__name__}.{name}, which is {type(kernel).__name__} over "
            f"{type(inner).__name__} and not heuristics over an autotuner with an argument H: "
            "install a supported vLLM, or set VLLM_B70=0."
        )
    kernel.fn = Pinned(name, inner)


def apply() -> None:
    """Pin every kernel that prompt chunks run through; safe to call again.

    Raises:
        PluginError: The environment asks for other arithmetic, or a kernel cannot be pinned.
    """
    import importlib

    from vllm_b70.plugin import PluginError

    for name, wanted in ARITHMETIC.items():
        found = os.environ.get(name, wanted)
        if found != wanted:
            raise PluginError(
                f"vllm_b70 cannot serve with {name}={found}, which changes the arithmetic of the "
                "chunked kernels: unset it, or set VLLM_B70=0."
            )
    for name in gdn_launches.chunk_kernels():
        pin(importlib.import_module(f"{PACKAGE}.{MODULES[name]}"), name)
