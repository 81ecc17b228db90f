"""No waiting for the device while a graph is recorded.

A wait inside a captured region is an error on CUDA; on an XPU it has taken two cards down with it.
vLLM enters every capture through ``torch.cuda.graph``, which its XPU runner points at that of
``torch.xpu``. While vLLM captures, ours takes its place: between its start and its end, whatever
would wait raises instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from vllm_b70.graphs.verify import GraphError

#: What moves values to the host; CUDA tells these by itself.
TO_HOST = (
    "item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__",
)  # fmt: skip

#: What CUDA and torch say of a call that waits, in sync-debug mode and while a graph is recorded.
CUDA_WAITS = ("synchronizing CUDA operation", "during CUDA graph capture")


def _waits(module: Any) -> list[tuple[Any, str]]:
    """What waits for a device, by its owner and name."""
    owners = [(module, "synchronize"), (torch.accelerator, "synchronize"), (module, "empty_cache")]
    owners += [(getattr(module, kind), "synchronize") for kind in ("Stream", "Event")]
    return owners


def _refusal(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise GraphError(
            f"{what} would wait for the device while a graph is recorded, which can take the "
            "card down: set VLLM_B70_GRAPHS=target if the drafter is being captured, else off, and "
            "report this as a bug of vllm_b70."
        )

    return refuse


def _unless_on_host(name: str) -> Callable[..., Any]:
    """A method of tensors that refuses those of a device."""
    original, refuse = getattr(torch.Tensor, name), _refusal(f"Tensor.{name}")

    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        run = original if tensor.device.type == "cpu" else refuse
        return run(tensor, *args, **kwargs)

    return method


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def no_waiting(module: Any) -> Iterator[None]:
    """Let everything that waits for a device raise.

    Args:
        module: ``torch.cuda`` or ``torch.xpu``.
    """
    with ExitStack() as stack:
        for owner, name in _waits(module):
            stack.enter_context(_replaced(owner, name, _refusal(f"{owner.__name__}.{name}")))
        if module is torch.cuda:
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("error")
        else:
            for name in TO_HOST:
                stack.enter_context(_replaced(torch.Tensor, name, _unless_on_host(name)))
        yield


@contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """Forbid waiting in every region that is captured meanwhile.

    Raises:
        GraphError: A region waits for the device, or is captured inside another; whatever ending
            the capture raises on top of it is set aside.
    """
    module = torch.get_device_module(device)
    capture = torch.cuda.graph
    reason: list[BaseException] = []

    @contextmanager
    def recording(*args: Any, **kwargs: Any) -> Iterator[None]:
        if module.is_current_stream_capturing():
            _refusal("a capture inside a capture")()
        with capture(*args, **kwargs):
            try:
                with no_waiting(module):
                    yield
            except BaseException as error:
                reason.append(error)
                raise

    with _replaced(torch.cuda, "graph", recording):
        try:
            yield
        except Exception as error:
            if not reason or isinstance(error, (GraphError, torch.OutOfMemoryError)):
                raise
            first = reason[0]
            if isinstance(first, GraphError):
                raise first from None
            if any(words in str(first) for words in CUDA_WAITS):
                _refusal(f"a call ({str(first).splitlines()[0]})")()
            raise first from None
