#!/usr/bin/env bash
# gpt-oss-120b: launch/recipes/gpt-oss-120b.sh h200|b200 [further flags]. The model card's numbers are from one H200.
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path openai/gpt-oss-120b
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/gpt-oss-120b-DFlash
  --speculative-num-draft-tokens 10 # model card: 4, 6 or 10
  --mem-fraction-static 0.8 # model card
  --dtype bfloat16 # model card: the weights are mxfp4, the draft's bf16
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
