"""The ``torch.ops.vllm_b70`` namespace."""

from __future__ import annotations

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
    for device in devices:
        _library.impl(name, implementation, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def use_torch_threads() -> None:
    """Let numba use as many threads as torch does; how many cannot change a result."""
    import numba

    numba.set_num_threads(max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)))
