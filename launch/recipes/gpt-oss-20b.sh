#!/usr/bin/env bash
# gpt-oss-20b: launch/recipes/gpt-oss-20b.sh h200|b200 [further flags].
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path openai/gpt-oss-20b
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/gpt-oss-20b-DFlash
  --speculative-num-draft-tokens 8 # the block the draft was trained with
  --mem-fraction-static 0.75 # model card
  --dtype bfloat16 # model card: the weights are mxfp4, the draft's bf16
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
