"""Launches of compiled Triton kernels that cost the host little.

Triton binds the arguments of a launch by name, writes its constants and options out as text and
looks the kernel up by that: tens of microseconds of Python, which a step of hundreds of launches
that no graph holds waits for. Here constants and options are settled once, and what Triton's first
launch returned is launched again for as long as Triton would find the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: Versions of Triton whose launch was read for what this module knows of it: ``JITFunction.run``,
#: the specialisation of arguments, ``CompiledKernel`` and CUDA's launcher.
TRITON = ((3, 6),)
#: Compiled kernels that a launcher remembers; no server is known to need a tenth of it.
MOST = 512


@functools.cache
def known() -> bool:
    """Whether this is a device and a Triton that can be launched directly."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) in TRITON


class Launcher:
    """A kernel with its constants and options: what it compiles to is up to the arguments alone.

    The kernel's globals must not change. Whoever watches launches (Triton's hooks, which profilers
    set) or debugs them gets Triton's own, and so does everybody where the way is not ``known``.
    """

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, Any],
        blocks: Mapping[int, tuple[Any, ...]] | None = None,
    ) -> None:
        """
        Args:
            kernel: What ``triton.jit`` made.
            constants: Its constexpr parameters, which come last, and options of the compiler.
            blocks: By the number of a pointer, for those that the kernel takes as a descriptor:
                ``from_tensor`` of the class, and its arguments after the tensor.

        Raises:
            ValueError: A constant stands before another parameter, or is missing.
        """
        self.kernel, self.constants, self._blocks = kernel, dict(constants), dict(blocks or {})
        self._direct = known() and _compiles(kernel)
        if not self._direct:
            return
        first = [p for p in kernel.params if p.name not in constants]
        last = kernel.params[len(first) :]
        if any(p.is_constexpr for p in first) or not all(p.is_constexpr for p in last):
            raise ValueError(f"{kernel.__name__} does not end in the constants {sorted(constants)}")
        self._last = tuple([constants[p.name] for p in last])
        #: Numbers of the arguments whose value changes nothing but the width of an integer.
        self._free = [i for i, p in enumerate(first) if p.do_not_specialize]
        #: How to launch what Triton made, and that itself, which must live as long.
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}
        from triton.knobs import compilation, runtime
        from triton.runtime.driver import driver

        # Bound once: what a launch looks up is what it costs.
        self._runtime, self._compilation, self._driver = runtime, compilation, driver.active

    def __call__(
        self, grid: tuple[int, ...], pointers: Sequence[torch.Tensor | None], *scalars: Any
    ) -> None:
        """Launch, on the current device and stream.

        Args:
            grid: Programs along up to three axes.
            pointers: For the first parameters; those of ``blocks`` as tensors.
            scalars: For those between the pointers and the constants.
        """
        if not self._direct or self._watched():
            self._launch(grid, pointers, scalars)
            return
        addresses = [None if t is None else t.data_ptr() for t in pointers]
        key = self._key(pointers, addresses, scalars)
        found = self._compiled.get(key)
        if found is None:
            compiled = self._launch(grid, pointers, scalars)
            if compiled is not None:  # A hook on compilation can prevent it.
                if len(self._compiled) >= MOST:
                    self._compiled.clear()
                self._compiled[key] = (*_entry(compiled), compiled)
            return
        # The addresses need no check: Triton let tensors of these devices pass.
        values: list[Any] = addresses
        for i, (describe, *block) in self._blocks.items():
            values[i] = describe(pointers[i], *block)
        launch, middle, _ = found
        x, y, z = (*grid, 1, 1)[:3]
        stream = self._driver.get_current_stream(key[0])
        launch(x, y, z, stream, *middle, *values, *scalars, *self._last)

    def _key(
        self,
        pointers: Sequence[torch.Tensor | None],
        addresses: list[int | None],
        scalars: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """What decides which kernel Triton launches, or more than that: the current device first.

        Triton specialises on a pointer's dtype and whether it is a multiple of 16, on the type of a
        scalar, and on an integer's width, being 1 and being a multiple of 16. The key holds the
        whole integer, which in a model is a size of its weights, unless it is not specialised on.
        """
        given = list(scalars)
        for i in self._free:
            if (i := i - len(pointers)) >= 0 and -(2**31) <= given[i] < 2**31:
                given[i] = None
        return (
            self._driver.get_current_device(),
            *[None if t is None else (t.dtype, t.get_device()) for t in pointers],
            *[None if a is None else a % 16 == 0 for a in addresses],
            *given,
            *map(type, scalars),
        )

    def _launch(
        self,
        grid: tuple[int, ...],
        pointers: Sequence[torch.Tensor | None],
        scalars: tuple[Any, ...],
    ) -> Any:
        """Triton's own launch; what it returns."""
        values: list[Any] = list(pointers)
        for i, (describe, *block) in self._blocks.items():
            values[i] = describe(pointers[i], *block)
        return self.kernel[grid](*values, *scalars, **self.constants)

    def _watched(self) -> Any:
        """Whether anything in Triton asks to see each launch, or to compile for debugging."""
        enter, leave = self._runtime.launch_enter_hook, self._runtime.launch_exit_hook
        return (
            self.kernel.pre_run_hooks
            or self._runtime.debug
            or getattr(self._compilation, "instrumentation_mode", "")
            or getattr(enter, "calls", enter)
            or getattr(leave, "calls", leave)
        )


def _compiles(kernel: Any) -> bool:
    """Whether a kernel is compiled, not interpreted or replaced."""
    from triton.runtime.jit import JITFunction

    return isinstance(kernel, JITFunction)


def _entry(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """How a compiled kernel is launched: what to call, and what it takes between the stream and the
    kernel's arguments."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    watchers = (None, None, None)  # the metadata of the launch and the two hooks
    if run.global_scratch_size or run.profile_scratch_size:
        return run, (function, metadata, *watchers)
    # What ``run`` itself does when it has no memory to allocate.
    flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
    return run.launch, (function, *flags, metadata, *watchers)
