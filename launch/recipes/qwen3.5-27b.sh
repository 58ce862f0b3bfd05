#!/usr/bin/env bash
# Qwen3.5-27B: launch/recipes/qwen3.5-27b.sh h200|b200 [further flags].
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path Qwen/Qwen3.5-27B
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/Qwen3.5-27B-DFlash
  --speculative-num-draft-tokens 16 # model card: 8 or 16; widths below it are chosen by load
  --mem-fraction-static 0.75 # model card
  --mamba-radix-cache-strategy extra_buffer # model card: prefixes are found inside generated text
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
