"""The ``torch.ops.vllm_b70`` namespace."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

import torch

NAMESPACE = "vllm_b70"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    schema: str,
    implementation: Callable[..., object],
    fake: Callable[..., object],
    devices: tuple[str, ...] = ("CPU",),
) -> None:
    """Define an op with one implementation.

    Args:
        schema: The op's schema, name included.
        implementation: Runs on real tensors.
        fake: Gives the results' shapes and dtypes to torch.compile.
        devices: Dispatch keys for which the implementation serves.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    implement(name, implementation, devices)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def implement(name: str, implementation: Callable[..., object], devices: tuple[str, ...]) -> None:
    """Add an implementation for further devices to an op that ``define`` made.

    Args:
        name: The op's name.
        implementation: Takes the same arguments; its results have the same shapes and dtypes.
        devices: Dispatch keys for which it serves.
    """
    for device in devices:
        _library.impl(name, implementation, device)


@functools.cache
def start_numba() -> None:
    """Import numba with as many threads as torch has; how many cannot change a result.

    To be called before anything of ``vllm_b70.cpu`` is imported. numba reads the number at import
    and later tells it to the OpenMP runtime that it shares with torch, so that its own default, one
    thread a core, would overrule what vLLM set for its worker.
    """
    if "numba" in sys.modules:
        return
    name, ours = "NUMBA_NUM_THREADS", "_B70_NUMBA_NUM_THREADS"
    if os.environ.get(name) != os.environ.get(ours):
        return  # The user's.
    # It stays there: numba reads its variables again whenever it compiles, and stops if the number
    # has changed. Ours is marked, as a child process, a worker for instance, has its own.
    os.environ[name] = os.environ[ours] = str(torch.get_num_threads())
    import numba  # noqa: F401
