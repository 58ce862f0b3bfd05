#!/usr/bin/env bash
# Serve the tiny hybrid pair without an accelerator, at http://127.0.0.1:30000/v1. Further arguments go to the server.
set -euo pipefail
cd "$(dirname "$0")/.."
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 SGLANG_MAMBA_CONV_DTYPE=float32
exec .venv/bin/python -m sglang.launch_server \
  --model-path sglang_dflash/assets/tiny/target \
  --speculative-algorithm DFLASH --speculative-draft-model-path sglang_dflash/assets/tiny/draft \
  --device cpu --attention-backend torch_native --dtype float32 \
  --max-running-requests 8 --max-total-tokens 8192 --sleep-on-idle \
  --max-mamba-cache-size 64 --mamba-radix-cache-strategy extra_buffer \
  --port 30000 "$@"
