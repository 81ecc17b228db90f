"""The certificate of a census: what was found, and the key of all that can change it.

A file for each key under vLLM's cache root. It is written whole or not at all, and believed only if
it holds what its own digest says.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch

# Sets a variable of numba's, which is then in every key and not in those alone that are made later.
from vllm_b70 import cpu  # noqa: F401
from vllm_b70.census.verdict import Named, Verdict
from vllm_b70.compat.versions import installed_vllm, version_of

#: Changes when the judges change what they ask.
FORMAT = 2
#: Variables that choose kernels, compilers or threads; every one of them is part of the key.
VARIABLES = (
    "CUBLAS_", "CUDA_", "DNNL_", "FLA_", "IGC_", "KMP_", "MKL_", "NUMBA_", "NVIDIA_", "OMP_",
    "ONEAPI_", "ONEDNN_", "PYTORCH_", "SYCL_", "TORCH", "TRITON_", "UR_", "VLLM_B70_LINEAR",
    "VLLM_CPU_", "VLLM_DISABLED_KERNELS", "VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_KV_CACHE_LAYOUT",
    "VLLM_SSM_CONV_STATE_LAYOUT", "ZE_",
)  # fmt: skip


@dataclass(frozen=True)
class Certificate:
    """What a census found.

    Attributes:
        key: All that can change it; see ``make_key``.
        verdicts: One for each op and shape.
        seconds: How long the census took.
    """

    key: dict[str, Any]
    verdicts: tuple[Verdict, ...]
    seconds: float

    @property
    def failures(self) -> list[Verdict]:
        """The ops that are not exact."""
        return [verdict for verdict in self.verdicts if not verdict.exact]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.key,
            "seconds": round(self.seconds, 3),
            "ops": [verdict.as_dict() for verdict in self.verdicts],
        }


def make_key(
    device: torch.device, probes: Sequence[Named], limits: dict[str, Any]
) -> dict[str, Any]:
    """All that can change what a census finds.

    Args:
        device: Where the ops run.
        probes: The ops and shapes.
        limits: Of the server: row counts, drafts, graphs.
    """
    return {
        "format": FORMAT,
        "device": _device(device),
        "versions": _versions(),
        "sources": sources(),
        "limits": limits,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "environ": {
            n: v
            for n, v in sorted(os.environ.items())
            # That one is ours, and there once numba is; the threads are in the key by themselves.
            if n.startswith(VARIABLES) and n != "NUMBA_NUM_THREADS"
        },
        "shapes": [[probe.op, probe.shape] for probe in probes],
    }


def _device(device: torch.device) -> dict[str, str]:
    if device.type == "cpu":
        lines = [line.partition(":") for line in _read("/proc/cpuinfo").splitlines()]
        found = {name.strip(): value.strip() for name, _, value in reversed(lines)}
        flags = hashlib.sha256(found.get("flags", "").encode()).hexdigest()[:16]
        return {
            "name": found.get("model name", platform.processor()),
            "driver": platform.release(),
            "capability": f"{platform.machine()} {flags} {found.get('microcode', '')}".strip(),
        }
    properties = torch.get_device_module(device).get_device_properties(device)
    driver = getattr(properties, "driver_version", None) or _read("/proc/driver/nvidia/version")
    return {
        "name": str(properties.name),
        "driver": driver.strip().partition("\n")[0],
        # The multiprocessors among them: the number of programs follows it.
        "capability": str(properties),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    """Of what the ops are made with; vLLM's binaries by size and time, as builds share versions."""
    versions = {"vllm": installed_vllm(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    # The vendors' libraries that torch brings, MKL and oneDNN among them, and what the CPU has.
    versions["torch.config"] = hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16]
    for name in (
        "vllm-b70",
        "vllm-xpu-kernels",
        "nvidia-cublas",
        "nvidia-cublas-cu12",
        "mkl",
        "onemkl-sycl-blas",
        "triton",
        "triton-xpu",
        "numba",
        "numpy",
        "llvmlite",
    ):
        if installed := version_of(name):
            versions[name] = installed
    import vllm

    for library in sorted(Path(vllm.__file__).parent.glob("*.so")):
        stat = library.stat()
        versions[library.name] = f"{stat.st_size} {stat.st_mtime_ns}"
    return versions


def sources() -> str:
    """Digest of the plugin's own code and tables."""
    digest = hashlib.sha256()

    def add(folder: Traversable, prefix: str) -> None:
        for entry in sorted(folder.iterdir(), key=lambda e: e.name):
            if entry.is_dir():
                add(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith((".py", ".json")):
                text = entry.read_bytes()
                digest.update(f"{prefix}{entry.name} {len(text)}\n".encode() + text)

    add(resources.files("vllm_b70"), "")
    return digest.hexdigest()


def path_of(key: dict[str, Any]) -> Path:
    """Where the certificate of a key is kept."""
    import vllm.envs as envs

    name = hashlib.sha256(_text(key).encode()).hexdigest()[:24]
    return Path(envs.VLLM_CACHE_ROOT) / "vllm_b70" / "census" / f"{name}.json"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, indent=1)


def load(key: dict[str, Any]) -> tuple[Certificate | None, str]:
    """The certificate kept for a key, if it can be believed and says that all is exact.

    Returns:
        The certificate or None, and what is wrong with the file; empty if there is none or if it
        is what it should be.
    """
    path = path_of(key)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, str(error)
    try:
        found = json.loads(text)
        digest = found.pop("digest")
        if digest != hashlib.sha256(_text(found).encode()).hexdigest():
            return None, "its digest is not that of what it holds"
        verdicts = tuple(Verdict(**op) for op in found.pop("ops"))
        seconds = found.pop("seconds")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"
    if found != json.loads(_text(key)):
        return None, "it was made for something else"
    certificate = Certificate(key, verdicts, seconds)
    # One that failed is there to be read; the next start looks again.
    return (None, "") if certificate.failures else (certificate, "")


def save(certificate: Certificate) -> Path:
    """Keep a certificate under its key; whoever reads sees the old file or the new one.

    Raises:
        OSError: It cannot be written.
    """
    path = path_of(certificate.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = certificate.as_dict()
    found["digest"] = hashlib.sha256(_text(found).encode()).hexdigest()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(_text(found) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
