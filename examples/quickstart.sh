#!/usr/bin/env bash
# The main job on a fresh machine, no GPU needed: installs everything into .venv, makes tiny INT4
# checkpoints, serves them with the real `vllm serve` and proves that nobody's tokens change.
#   bash examples/quickstart.sh             the proof (about 10 minutes after the installation)
#   bash examples/quickstart.sh --control   also the controls, which must differ
#   bash examples/quickstart.sh --full      also every draft depth (about an hour)
# Ends with a table and results/quickstart.json; exits non-zero if anything differs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment cpu
exec vllm-b70 quickstart --workdir results/work --results results/quickstart.json "$@"
