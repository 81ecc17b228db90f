#!/usr/bin/env bash
# Everything that a CUDA device decides about the gated delta net, under 4 minutes on an H200 with
# 16 cores: the launches, the race with vLLM's kernels, and the tests with those launches.
#   bash benchmarks/gated_delta_net_on_cuda.sh OUT [tune|compare|test ...]   default: all three
# Resumable: a table in OUT is not made again, rows of OUT/path-h200.json are not timed again. The
# table replaces vllm_b70/ops/gdn_launches.json of this checkout, so that the tests are of it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="$1"
shift
stages="${*:-tune compare test}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 VLLM_LOGGING_LEVEL=ERROR
python="${PYTHON:-python3}"
begin=$SECONDS
note() { echo "== $1 after $((SECONDS - begin)) s"; }

if [[ " $stages " == *" tune "* ]] && [ ! -s "$out/gdn_launches.json" ]; then
  "$python" benchmarks/bench_gated_delta_net.py tune --out "$out/gdn_launches.json" \
    --seconds 100 2>&1 | tee -a "$out/tune.log"
  note tune
fi
[ -s "$out/gdn_launches.json" ] && cp "$out/gdn_launches.json" vllm_b70/ops/gdn_launches.json
if [[ " $stages " == *" compare "* ]]; then
  "$python" benchmarks/bench_gated_delta_net.py compare --out "$out/path-h200.json" \
    --seconds 70 2>&1 | tee -a "$out/compare.log"
  note compare
fi
if [[ " $stages " == *" test "* ]]; then
  tests=tests/gpu/test_gated_delta_net.py
  "$python" -m pytest -v -p no:cacheprovider "$tests" --durations=12 2>&1 | tee -a "$out/test.log"
  note tests
fi
