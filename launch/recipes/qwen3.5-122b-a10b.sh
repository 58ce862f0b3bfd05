#!/usr/bin/env bash
# Qwen3.5-122B-A10B: launch/recipes/qwen3.5-122b-a10b.sh h200|b200 [further flags].
source "$(dirname "$0")/gpu.sh"
declare -A tp_size=([h200]=4 [b200]=2)
flags=(
  --model-path Qwen/Qwen3.5-122B-A10B
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/Qwen3.5-122B-A10B-DFlash
  --speculative-num-draft-tokens 16 # the block the draft was trained with
  --tp-size "${tp_size[$GPU]}" # 250 GB of weights; on two H200, 2 requests of 8k tokens (computed)
  --mamba-radix-cache-strategy extra_buffer # as on the model cards of the smaller ones
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
