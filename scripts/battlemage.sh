#!/usr/bin/env bash
# Compile every kernel for a Battlemage card, without a GPU, and write the report.
#   bash scripts/battlemage.sh           writes benchmarks/results/battlemage.json
#   bash scripts/battlemage.sh FILE      writes FILE
# triton-xpu takes the place of triton, so it has an environment of its own: ${VENV:-.venv}-xpu.
# Exit status: 1 if a kernel is not as it should be, 3 if triton-xpu cannot be installed.
set -euo pipefail
out="${1:+$(realpath -m "$1")}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${VENV:-.venv}-xpu"
version=3.3.0b1
if ! "$venv/bin/python" -c "
import importlib.metadata, sys
sys.exit(importlib.metadata.version('triton-xpu') != '$version')" 2>/dev/null; then
  echo "making the environment $venv with triton-xpu $version"
  rm -rf "$venv"
  if ! { "${PYTHON:-python3}" -m venv "$venv" && "$venv/bin/python" -m pip install --quiet \
      --disable-pip-version-check "triton-xpu==$version" numpy "setuptools<81"; }; then
    echo "triton-xpu $version could not be installed, so nothing was compiled for Battlemage." >&2
    exit 3
  fi
fi
"$venv/bin/python" benchmarks/battlemage.py ${out:+--out "$out"}
