#!/usr/bin/env bash
# Qwen3.6-27B: launch/recipes/qwen3.6-27b.sh h200|b200 [further flags].
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path Qwen/Qwen3.6-27B
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/Qwen3.6-27B-DFlash
  --speculative-num-draft-tokens 16 # the block the draft was trained with
  --mem-fraction-static 0.75 # as on the model card of Qwen3.5-27B
  --mamba-radix-cache-strategy extra_buffer # likewise: prefixes are found inside generated text
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
