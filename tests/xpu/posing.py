"""CPU tensors that pose as an XPU's: each says that it is on ``xpu:0`` and is made where it is.

From the import of this module on, which has to come before that of vLLM's layers.
"""

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.platforms import current_platform

XPU = torch.device("xpu", 0)


class Posing(TorchFunctionMode):
    """What is to be made on the XPU, or moved there, stays on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: self.real(v) for k, v in (kwargs or {}).items() if k != "pin_memory"}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        return func(*map(self.real, args), **kwargs)

    @staticmethod
    def real(value: Any) -> Any:
        """The CPU in place of the XPU."""
        if isinstance(value, torch.device) or (isinstance(value, str) and value[:3] == "xpu"):
            return torch.device("cpu") if torch.device(value).type == "xpu" else value
        return value


def pose() -> None:
    """Let every tensor on the CPU say that it is on the XPU, and ops registered from now on make
    theirs there too: a mode is off while what it intercepted runs."""
    device = torch.Tensor.device
    torch.Tensor.device = property(
        lambda self: XPU if (found := device.__get__(self)).type == "cpu" else found
    )
    register = torch.library.Library.impl

    def impl(self: Any, name: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(function)
        def posing(*inputs: Any, **options: Any) -> Any:
            with Posing():
                return function(*inputs, **options)

        return register(self, name, posing, *args, **kwargs)

    torch.library.Library.impl = impl


# vLLM registers its ops for the tensors of its platform.
type(current_platform).dispatch_key = "CPU"
pose()
