#!/usr/bin/env bash
# The Python files of another vLLM, to run the stub tests on before it is supported:
#   XPU_STUB_SOURCES=$(bash scripts/vllm_sources.sh 0.33.0) pytest tests/xpu
# They come out of the wheel for CUDA, the only one that every version has; nothing is installed.
set -euo pipefail
version="$1"
folder="${2:-$PWD/build/vllm-$version}"
if [ ! -d "$folder/vllm" ]; then
  wheel="$(mktemp -d)"
  trap 'rm -rf "$wheel"' EXIT
  python -m pip download --quiet --no-deps --only-binary :all: --dest "$wheel" "vllm==$version" >&2
  python - "$wheel" "$folder" <<'PYTHON'
import pathlib, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = [n for n in archive.namelist() if n.endswith((".py", ".json", "METADATA"))]
    archive.extractall(sys.argv[2], names)
PYTHON
fi
echo "$folder"
