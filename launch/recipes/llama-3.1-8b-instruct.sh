#!/usr/bin/env bash
# Llama-3.1-8B-Instruct: launch/recipes/llama-3.1-8b-instruct.sh h200|b200 [further flags].
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path meta-llama/Llama-3.1-8B-Instruct
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat
  --speculative-num-draft-tokens 10 # the block the draft was trained with
  --mem-fraction-static 0.75 # model card
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
