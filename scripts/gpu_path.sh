#!/usr/bin/env bash
# Norms and attention on a CUDA machine: tests, choice of launches, race. About four minutes.
#   bash scripts/gpu_path.sh OUT            everything
#   bash scripts/gpu_path.sh OUT tests      or: tune, compare
# Needs torch, triton, pytest; compare and the row-wise tests need vLLM's CUDA ops. Results go to
# OUT as they are measured; a second run with the files of the first goes on where it ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1
what=${2:-all}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"

tests() {
  # Compiling is most of the time: the groups share Triton's cache and run side by side.
  local groups=(
    "c1_widths and 256 and bfloat16" "c1_widths and 256 and float16 and not bfloat16"
    "c1_widths and 128" "c1_widths and 64"
    "blocks_and_layouts" "sixty_four or 131072"
    "not c1_widths and not blocks_and_layouts and not sixty_four and not 131072"
  )
  local ids=() i
  for i in "${!groups[@]}"; do
    python3 -m pytest -p no:cacheprovider tests/gpu/test_attention.py -k "${groups[$i]}" \
      >"$out/attention-$i.txt" 2>&1 &
    ids+=($!)
  done
  python3 -m pytest -p no:cacheprovider tests/gpu/test_norm.py >"$out/norm.txt" 2>&1 &
  ids+=($!)
  python3 -m pytest -p no:cacheprovider tests/gpu/test_rowwise.py >"$out/rowwise.txt" 2>&1 &
  ids+=($!)
  wait "${ids[@]}"
  for file in "$out"/attention-*.txt "$out/norm.txt" "$out/rowwise.txt"; do
    echo "== ${file##*/}"
    grep -E "^(FAILED|ERROR|E  )|passed|failed|skipped|Error" "$file" | head -20
  done
}

[ "$what" = all ] || [ "$what" = tests ] && tests
[ "$what" = all ] || [ "$what" = tune ] &&
  python3 benchmarks/bench_path.py tune --out "$out/tune.jsonl" --seconds 110 >"$out/tune.txt" 2>&1
[ -f "$out/tune.txt" ] && grep -E "compiled|cannot|not run|score|Error" "$out/tune.txt" | head -30
[ "$what" = all ] || [ "$what" = compare ] &&
  python3 benchmarks/bench_path.py compare --tune "$out/tune.jsonl" --out "$out/path.json" --seconds 90
exit 0
