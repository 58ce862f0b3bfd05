#!/usr/bin/env bash
# Qwen3-Coder-Next: launch/recipes/qwen3-coder-next.sh h200|b200 [further flags]. 159 GB of weights: two cards.
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path Qwen/Qwen3-Coder-Next
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/Qwen3-Coder-Next-DFlash
  --speculative-num-draft-tokens 16 # the block the draft was trained with
  --tp-size 2 # one H200 is too small, one B200 holds 4 requests of 8k tokens (computed)
  --mamba-radix-cache-strategy extra_buffer # as on the model cards of Qwen3.5
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
