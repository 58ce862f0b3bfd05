#!/usr/bin/env bash
# Qwen3-4B: launch/recipes/qwen3-4b.sh h200|b200 [further flags]. Its draft was trained on answers without thinking.
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path Qwen/Qwen3-4B
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/Qwen3-4B-DFlash-b16
  --speculative-num-draft-tokens 16 # the block the draft was trained with
  --mem-fraction-static 0.75 # model card
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
