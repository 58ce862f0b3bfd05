#!/usr/bin/env bash
# gemma-4-31B-it: launch/recipes/gemma-4-31b-it.sh h200|b200 [further flags].
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path google/gemma-4-31B-it
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/gemma-4-31B-it-DFlash
  --speculative-num-draft-tokens 16 # model card
  --attention-backend triton # model card; fa3 has no heads of 512
)
if [[ $GPU == h200 ]]; then flags+=(--speculative-draft-attention-backend fa3); fi # fa4 on the model card, for a B300
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
