#!/usr/bin/env bash
# Kimi-K2.5: launch/recipes/kimi-k2.5.sh h200|b200 [further flags].
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path moonshotai/Kimi-K2.5
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/Kimi-K2.5-DFlash
  --speculative-num-draft-tokens 8 # model card
  --tp-size 8 # model card
  --mem-fraction-static 0.9 # model card: a trillion parameters in int4 leave little
  --speculative-draft-window-size 4096 # model card: the draft keeps a ring per request instead of the context
  --trust-remote-code # of the target: its tokenizer is code; no draft's code is run
)
if [[ $GPU == b200 ]]; then flags+=(--attention-backend trtllm_mla); fi # model card; on Hopper fa3 does it
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
