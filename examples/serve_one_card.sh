#!/usr/bin/env bash
# The plain one-card command for RedHatAI's 9B. Nothing here is a special launcher: with the plugin
# installed, VLLM_B70=1 and `vllm serve` are all there is.
#
# What has been run: such commands on vLLM's CPU build with tiny checkpoints of the same form
# (examples/quickstart.sh --full). What has not: this model itself, and any XPU; docs/b70.md says in
# which order to try one.
set -euo pipefail
export VLLM_B70=1
exec vllm serve "${MODEL:-RedHatAI/Qwen3.5-9B-quantized.w4a16}" \
  --language-model-only \
  --max-model-len 8192 \
  --max-num-seqs 32 \
  --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}' \
  "$@"
