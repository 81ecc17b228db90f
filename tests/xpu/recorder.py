"""A graph of ``torch.xpu`` on CPU tensors that pose as an XPU's (``posing``).

What runs inside a capture is recorded, op by op and launch by launch of Triton's interpreter, and a
replay runs it again on the same tensors: like a device's graph it knows addresses and not names, so
it follows a buffer that is filled and is deaf to one that takes its place.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter
from vllm.forward_context import (
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
)

from vllm_b70.graphs.recording import TO_HOST

_capturing: list["XPUGraph"] = []
_HOST = {name: getattr(torch.Tensor, name) for name in TO_HOST}
_device_side = False


@contextmanager
def _on_the_device() -> Iterator[None]:
    """What an op does is the device's, whose stand-in may read tensors."""
    global _device_side
    outer, _device_side = _device_side, True
    held = {name: getattr(torch.Tensor, name) for name in _HOST}
    for name, method in _HOST.items():
        setattr(torch.Tensor, name, method)
    try:
        yield
    finally:
        _device_side = outer
        for name, method in held.items():
            setattr(torch.Tensor, name, method)


class _Ops(TorchDispatchMode):
    """Records the outermost ops; what one of our ops launches is recorded with it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with _on_the_device():
            out = func(*args, **kwargs)
        if not _device_side:
            _capturing[-1].add(func, args, kwargs, out)
        return out


class XPUGraph:
    """Stands for ``torch.xpu.XPUGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record a call and the tensors that it made, as long as vLLM's metadata stay."""
        context = get_forward_context() if is_forward_context_available() else None
        self.steps.append((context, func, args, kwargs, out))

    def replay(self) -> None:
        """Run everything again, into the tensors of the capture."""
        for context, func, args, kwargs, out in self.steps:
            with override_forward_context(context):
                made = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class graph:
    """Stands for ``torch.xpu.graph``, which waits for the device before it begins."""

    def __init__(self, graph: XPUGraph, pool: Any = None, stream: Any = None) -> None:
        self.graph, self.ops = graph, _Ops()

    def __enter__(self) -> None:
        torch.xpu.synchronize()
        _capturing.append(self.graph)
        self.ops.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.ops.__exit__(*error)
        _capturing.pop()


class Stream:
    """Everything runs at once here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    wait_stream = wait_event = record_event = lambda self, other=None: None

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class Event(Stream):
    """As ``Stream``."""

    record = query = lambda self, stream=None: True


def install() -> None:
    """Give ``torch.xpu`` what vLLM's runner and its captures ask of it."""
    stream = Stream()
    xpu = torch.xpu
    xpu.Stream, xpu.Event, xpu.XPUGraph, xpu.graph = Stream, Event, XPUGraph, graph
    xpu.current_stream = lambda device=None: stream
    xpu.stream = lambda stream: stream
    xpu.set_stream = lambda stream: None
    xpu.graph_pool_handle = lambda: (0, 0)
    xpu.is_current_stream_capturing = lambda: bool(_capturing)
    xpu.synchronize = xpu.empty_cache = lambda device=None: None
    xpu.reset_peak_memory_stats = lambda device=None: None
    xpu.max_memory_allocated = lambda device=None: 0
    accelerator = torch.accelerator
    accelerator.synchronize = accelerator.empty_cache = lambda device=None: None
    accelerator.get_memory_info = lambda device=None: (2**34, 2**34)
    accelerator.max_memory_allocated = lambda device=None: 0
    launch = interpreter.GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _capturing and not _device_side:
            with _on_the_device():
                launch(self, *args, **kwargs)
            _capturing[-1].add(functools.partial(launch, self), args, kwargs, None)
        else:
            launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = recorded
