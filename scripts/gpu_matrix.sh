#!/usr/bin/env bash
# Everything that a CUDA machine decides, in stages; each ends with one archive OUT/STAGE.tar.gz, so
# that a machine that gives back few files gives back all. A stage whose archive is there is left out.
#   bash scripts/gpu_matrix.sh OUT STAGE ...
# Stages (about how long on an H200 with 16 cores, caches filled by earlier ones):
#   tests    tests/gpu, side by side                                  200 s
#   census   tests/gpu/test_census.py, which prints its times            300 s
#   gemm     INT4 and 16-bit GEMMs against their peers                150 s
#   draft    the 4-bit draft head: tiles, its floor, a draft pass     110 s
#   path     norms and attention                                       60 s
#   gdn      launches of the gated delta net, and the race            130 s
#   tiny     zero flips: the tiny 9B, every depth, replicas, stock    300 s
#   27b      zero flips: the tiny 27B and one of its widths           150 s
#   long     one request of 2K, 8K and 32K tokens, depth 3             90 s
#   speed    zero flips and speed: the 9B's widths, ours, stock and vendor linears  330 s (estimated)
#   native16 the same with all weights in 16 bit, without stock       300 s (estimated)
#   profile  where a step's time goes at 64 users, beside stock       150 s (estimated)
#   depth    schedules of draft depths against fixed ones, depth 0    250 s (estimated)
# Needs vLLM with its CUDA ops, pytest, and this project importable from the checkout.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1
shift
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 VLLM_LOGGING_LEVEL=ERROR
mkdir -p "$out"
models=${MODELS:-/tmp/b70-models}

cell() { # work name arguments...
  timeout -k 10 "${LIMIT:-240}" python3 benchmarks/exact_gpu.py cell --out "$1/cells/$2.json" "${@:3}" \
    >"$1/$2.log" 2>&1
  grep -a " users \|Error:\|DISTURBED" "$1/$2.log" | tail -6 | cut -c1-200
}

turn() { # N/M work name arguments...: a cell that is timed in its turn
  cell "$2" "$3" --turn "$1" "${@:4}"
  touch "$2/cells/ready-${1%/*}" "$2/cells/done-${1%/*}"
}

replica() { # number work arguments...: a cell with caches of its own, empty at first
  local own
  own=$(mktemp -d)
  # Without the census, which would compile for minutes and changes no answer.
  VLLM_B70_CENSUS=off TRITON_CACHE_DIR=$own/triton VLLM_CACHE_ROOT=$own/vllm \
    TORCHINDUCTOR_CACHE_DIR=$own/inductor TRITON_CACHE_AUTOTUNING=0 LIMIT=${LIMIT:-400} \
    cell "$2" "replica-$1" --replica "$1" "${@:3}"
}

make_tiny() {
  python3 -c "
import sys
from pathlib import Path
from vllm_b70.checkpoints.tiny import make_tiny
for layout, shape in (('ct', '9b'), ('gptq', '27b')):
    folder = Path(sys.argv[1]) / ('tiny-' + shape)
    if not folder.exists():
        make_tiny(folder, format=layout, shape=shape)
" "$models"
}

stage_tests() {
  local file ids=()
  bash scripts/gpu_path.sh "$1/path" tests &
  ids+=($!)
  for file in test_gemm test_overlap test_repack test_int4_gemm test_draft_head test_gated_delta_net test_native \
    test_launch test_graphs test_warm_up test_catch_up; do
    timeout 300 python3 -m pytest -s -p no:cacheprovider "tests/gpu/$file.py" >"$1/$file.txt" 2>&1 &
    ids+=($!)
  done
  wait "${ids[@]}"
  # One line a file: what failed, else the dots of what passed.
  grep -aE '^(FAILED|ERROR|E  )|Error|^[.sFEx]+( +\[|$)| on the host, ' "$1"/*.txt "$1"/path/*.txt | sed "s|$1/||" | cut -c1-160
}

stage_census() {
  local group ids=() i=0
  for group in "widths and 9b" "widths and 27b" "not widths"; do
    timeout 560 python3 -m pytest -s -p no:cacheprovider tests/gpu/test_census.py -k "$group" \
      >"$1/census-$((i++)).txt" 2>&1 &
    ids+=($!)
  done
  wait "${ids[@]}"
  grep -aE '^(FAILED|ERROR|E  )|Error| passed| failed| s$|^(warm|stock) ' "$1"/census-*.txt |
    sed "s|$1/||" | cut -c1-160
}

stage_gemm() {
  timeout 110 python3 benchmarks/bench_int4_linear.py compare --peers marlin,machete,humming \
    --shapes 24576x4096,4096x12288,10240x4096,4096x4096,34816x5120,5120x17408 \
    --dtypes float16 --out "$1/int4.json" --seconds 90 >"$1/int4.txt" 2>&1
  timeout 70 python3 benchmarks/bench_linear.py compare --out "$1/linear.json" --seconds 55 \
    >"$1/linear.txt" 2>&1
  grep -h "ratios\|cublas" "$1"/*.txt | cut -c1-160
}

stage_draft() {
  timeout 70 python3 benchmarks/bench_draft.py tune --out "$1/tiles.json" --seconds 55 \
    >"$1/tune.txt" 2>&1
  timeout 60 python3 benchmarks/bench_draft.py compare --tiles "$1/tiles.json" --dtypes bfloat16 \
    --out "$1/draft.json" --seconds 45 >"$1/draft.txt" 2>&1
  grep -h " rows \|^op=\|DIFFERING\|Error" "$1"/*.txt | cut -c1-220
}

stage_path() {
  timeout 80 python3 benchmarks/bench_path.py compare --out "$1/path.json" --seconds 60 \
    >"$1/path.txt" 2>&1
  grep -a "^op=" "$1/path.txt" | cut -c1-200
}

stage_gdn() {
  timeout 170 bash benchmarks/gated_delta_net_on_cuda.sh "$1/gdn" tune compare >"$1/gdn.txt" 2>&1
  tail -n 30 "$1/gdn.txt" | cut -c1-200
}

stage_tiny() {
  make_tiny
  local model=(--model "$models/tiny-9b" --kv-gib 3)
  # Side by side: what they answer is compared, not how fast.
  cell "$1" d0 "${model[@]}" --users 1,8,32,64,128 &
  cell "$1" d1 "${model[@]}" --depth 1 &
  cell "$1" d3 "${model[@]}" --depth 3 &
  cell "$1" d6 "${model[@]}" --depth 6 &
  replica 1 "$1" "${model[@]}" --depth 3 --users 64 &
  replica 2 "$1" "${model[@]}" --depth 3 --users 64 &
  cell "$1" d3-no-graphs "${model[@]}" --depth 3 --graphs off --users 64 &
  cell "$1" d2 "${model[@]}" --depth 2 --users 32 &
  cell "$1" d4 "${model[@]}" --depth 4 --users 32,64 &
  cell "$1" s0 "${model[@]}" --route stock --users 1,64 --solo 64 &
  cell "$1" s3 "${model[@]}" --route stock --depth 3 --users 64 &
  wait
  python3 benchmarks/exact_gpu.py collect "$1/cells" --out "$1/exact.json" | cut -c1-300
}

stage_27b() {
  make_tiny
  local model=(--model "$models/tiny-27b" --dtype float16 --kv-gib 3)
  cell "$1" t0 "${model[@]}" --users 1,64 &
  cell "$1" t3 "${model[@]}" --depth 3 --users 64 &
  cell "$1" ts0 "${model[@]}" --route stock --users 1,64 --solo 64 &
  [ -d "$models/wide-27b" ] || python3 benchmarks/wide_checkpoint.py 27b "$models/wide-27b"
  model=(--model "$models/wide-27b" --max-num-seqs 64 --kv-gib 6)
  cell "$1" w0 "${model[@]}" --users 1,64 &
  cell "$1" w4 "${model[@]}" --depth 4 --users 64 &
  wait
  python3 benchmarks/exact_gpu.py collect "$1/cells" --out "$1/exact.json" | cut -c1-300
}

stage_long() {
  make_tiny
  # Rotary positions are computed, so the tiny model reads as far as its configuration says.
  [ -d "$models/long-9b" ] || cp -r "$models/tiny-9b" "$models/long-9b"
  sed -i 's/"max_position_embeddings": *[0-9]*/"max_position_embeddings": 40960/' \
    "$models/long-9b/config.json"
  local options=(--model "$models/long-9b" --lengths 2048,8192,32768 --max-model-len 33024
    --max-num-seqs 8 --users 1 --kv-gib 3)
  cell "$1" d0 "${options[@]}" &
  cell "$1" d3 "${options[@]}" --depth 3 &
  wait
  python3 benchmarks/exact_gpu.py collect "$1/cells" --out "$1/exact.json" | cut -c1-300
}

side_by_side() { # work model route...: depths 0 and 3 of each start together and are timed in turn
  local work=$1 options=(--model "$2" --users 1,64 --prompts 128 --new-tokens 128
    --max-num-seqs 64 --kv-gib 8)
  shift 2
  local route depth solo n=0 LIMIT=560
  # What was settled, certified and verified, and how long it took. The graphs of every route but
  # stock are captured and verified, or it does not start.
  local -x VLLM_LOGGING_LEVEL=INFO VLLM_B70_GRAPHS=all
  for route in "$@"; do
    for depth in 0 3; do
      # Depth 0 is the oracle of its route, for as many sequences as it answers alone.
      case $route-$depth in
        exact-0) solo=128 ;;
        *-0) solo=64 ;;
        *) solo=16 ;;
      esac
      n=$((n + 1))
      turn "$n/$((2 * $#))" "$work" "$route-$depth" "${options[@]}" --route "$route" \
        --depth "$depth" --solo "$solo" &
    done
  done
  wait
  python3 benchmarks/exact_gpu.py collect "$work/cells" --out "$work/exact.json" | cut -c1-300
  # By engine, how long each part took; then, once, the routes of the linears.
  (cd "$work" && grep -ao "vllm_b70: \(linears\|census\|warm-up\|graphs\): .*" ./*.log) | cut -c3-200
  grep -aoh "vllm_b70: \(linear\|lm_head\|int4_linear\) .*" "$work"/*.log | sort -u | cut -c1-260
}

stage_speed() {
  [ -d "$models/wide-9b" ] || python3 benchmarks/wide_checkpoint.py 9b "$models/wide-9b"
  side_by_side "$1" "$models/wide-9b" exact stock native
}

stage_native16() {
  [ -d "$models/wide-9b-bf16" ] ||
    python3 benchmarks/wide_checkpoint.py 9b "$models/wide-9b-bf16" --format bf16
  side_by_side "$1" "$models/wide-9b-bf16" exact native
}

stage_profile() {
  [ -d "$models/wide-9b" ] || python3 benchmarks/wide_checkpoint.py 9b "$models/wide-9b"
  local route n=0
  for route in exact stock; do
    n=$((n + 1))
    (
      timeout -k 10 300 python3 benchmarks/profile_steps.py "$models/wide-9b" "$1/$route.txt" \
        --route $route --turn "$n/2" >"$1/$route.log" 2>&1
      touch "$1/ready-$n" "$1/done-$n"
      grep -a "ms a step\|kernels a step" "$1/$route.txt" | sed "s/^/$route /"
    ) &
  done
  wait
}

stage_depth() {
  [ -d "$models/wide-9b" ] || python3 benchmarks/wide_checkpoint.py 9b "$models/wide-9b"
  [ -d "$models/agree-9b" ] ||
    python3 benchmarks/depth_gpu.py agree "$models/wide-9b" "$models/agree-9b"
  depth_cell() { # work name arguments...
    timeout -k 10 400 python3 benchmarks/depth_gpu.py cell --model "$models/agree-9b" \
      --out "$1/cells/$2.json" "${@:3}" >"$1/$2.log" 2>&1
    grep -a " users \|Error:\|DISTURBED" "$1/$2.log" | tail -6 | cut -c1-200
  }
  depth_turn() { # N work name arguments...: of five that start side by side and measure in turn
    depth_cell "$2" "$3" --turn "$1/5" "${@:4}"
    touch "$2/cells/ready-$1" "$2/cells/done-$1"
  }
  local depth
  for depth in 0 1 2 3; do
    depth_turn $((depth + 1)) "$1" "d$depth" --depth $depth &
  done
  depth_turn 5 "$1" issue --schedule '[[1,8,3],[9,16,1],[17,64,0]]' &
  wait
  # Its schedule is worked out from what the fixed depths have shown.
  depth_cell "$1" tuned --tuned "$1/cells"
  python3 benchmarks/depth_gpu.py collect "$1/cells" --out "$1/depth.json" | cut -c1-300
}

for stage in "$@"; do
  [ -f "$out/$stage.tar.gz" ] && continue
  begin=$SECONDS
  work=$(mktemp -d)
  mkdir -p "$work/cells"
  # What is there so far comes back even if the machine's time ends first.
  while sleep 20; do tar czf "$out/$stage.partial.tar.gz" -C "$work" . 2>/dev/null; done &
  keeper=$!
  ("stage_$stage" "$work")  # by itself: it waits for all jobs of its own
  kill $keeper
  wait $keeper 2>/dev/null
  rm -f "$out/$stage.partial.tar.gz"
  tar czf "$out/$stage.tar.gz" -C "$work" .
  echo "== $stage took $((SECONDS - begin)) s"
done
