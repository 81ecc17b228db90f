#!/usr/bin/env bash
# All tests, in an environment of its own making.
#   bash scripts/test.sh          lint, types, unit tests, then real servers (under 30 minutes)
#   bash scripts/test.sh --unit   lint, types and unit tests (5 minutes once installed)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment cpu,dev
ruff check .
mypy
# What the compiler makes for an XPU now; tests/battlemage compares the kept report with it, and
# skips that where triton-xpu cannot be installed (status 3).
export BATTLEMAGE_FRESH="$PWD/build/battlemage.json"
rm -f "$BATTLEMAGE_FRESH"
bash scripts/battlemage.sh "$BATTLEMAGE_FRESH" || [ $? = 3 ]
pytest -m "not e2e" -n 2
# Triton reads this when it is first imported, so the kernels have a process of their own.
TRITON_INTERPRET=1 pytest tests/kernels -n 2
if [ "${1:-}" != "--unit" ]; then
  pytest -m e2e
fi
