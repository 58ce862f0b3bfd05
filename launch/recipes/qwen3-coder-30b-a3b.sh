#!/usr/bin/env bash
# Qwen3-Coder-30B-A3B-Instruct: launch/recipes/qwen3-coder-30b-a3b.sh h200|b200 [further flags].
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path Qwen/Qwen3-Coder-30B-A3B-Instruct
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/Qwen3-Coder-30B-A3B-DFlash
  --speculative-num-draft-tokens 16 # the block the draft was trained with
  --mem-fraction-static 0.75 # as on the model card of Qwen3-4B
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
