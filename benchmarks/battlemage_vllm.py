"""vLLM's chunked gated-delta-net kernels, without importing vLLM or torch.

Their files are in ``vllm/third_party``; what they import is stood in for, so that what is left is
functions that Triton can compile.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

PACKAGE = "vllm.third_party.flash_linear_attention.ops"
#: What has the kernels, and what those call.
FILES = (
    "cumsum",
    "chunk_scaled_dot_kkt",
    "solve_tril",
    "wy_fast",
    "chunk_delta_h",
    "chunk_o",
    "op",
)


def folder() -> Path:
    """Where the installed vLLM keeps them; vLLM itself is not imported.

    Raises:
        FileNotFoundError: No vLLM is installed, nor those files of one.
    """
    spec = importlib.util.find_spec("vllm")
    for root in (spec.submodule_search_locations or []) if spec else []:
        found = Path(root, *PACKAGE.split(".")[1:])
        if found.is_dir():
            return found
    raise FileNotFoundError("vLLM's third_party/flash_linear_attention/ops is not installed")


def sources() -> dict[str, str]:
    """sha256 of the files that have the kernels, by name."""
    files = [folder() / f"{name}.py" for name in FILES]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def kernel(module: str, name: str) -> Any:
    """One kernel as Triton compiles it, without its autotuner and heuristics.

    Args:
        module: File in the folder, without ``.py``.
        name: Function of it.
    """
    _stand_in()
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


def _stand_in() -> None:
    import triton
    import triton.language as tl

    if PACKAGE in sys.modules:
        return

    def as_it_is(*_: Any, **__: Any) -> Any:
        return lambda function: function

    for name, members in {
        "torch": {"version": types.SimpleNamespace(hip=None), "Tensor": int, "dtype": int,
                  "float": None, "float32": None},
        "vllm.platforms": {"current_platform": mock.Mock(is_rocm=lambda: False)},
        "vllm.triton_utils": {
            "tl": tl, "tldevice": None,
            # An autotuner asks for a device when it is made.
            "triton": types.SimpleNamespace(
                jit=triton.jit, Config=triton.Config, cdiv=triton.cdiv, language=tl,
                autotune=as_it_is, heuristics=as_it_is,
            ),
        },
        f"{PACKAGE}.index": {"prepare_chunk_indices": None, "prepare_chunk_offsets": None},
        f"{PACKAGE}.utils": {
            "FLA_CHUNK_SIZE": 64, "use_cuda_graph": False, "is_nvidia_hopper": False,
            "is_amd": False, "is_tma_supported": False, "is_gather_supported": True,
            "check_shared_mem": lambda *_: True, "input_guard": lambda function: function,
        },
        PACKAGE: {"__path__": [str(folder())]},
    }.items():  # fmt: skip
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)
    for name in ("vllm", "vllm.third_party", "vllm.third_party.flash_linear_attention"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []  # type: ignore[attr-defined]
