#!/usr/bin/env bash
# Qwen3-8B: launch/recipes/qwen3-8b.sh h200|b200 [further flags]. Its draft was trained on answers without thinking.
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path Qwen/Qwen3-8B
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16
  --speculative-num-draft-tokens 16 # the block the draft was trained with
  --mem-fraction-static 0.75 # as on the model card of Qwen3-4B
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
