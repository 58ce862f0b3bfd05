#!/usr/bin/env bash
# gemma-4-26B-A4B-it: launch/recipes/gemma-4-26b-a4b-it.sh h200|b200 [further flags].
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path google/gemma-4-26B-A4B-it
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/gemma-4-26B-A4B-it-DFlash
  --speculative-num-draft-tokens 16 # the block the draft was trained with
  --attention-backend triton # as on the model card of gemma-4-31B-it; fa3 has no heads of 512
)
if [[ $GPU == h200 ]]; then flags+=(--speculative-draft-attention-backend fa3); fi # fa4 on the model card, for a B300
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
