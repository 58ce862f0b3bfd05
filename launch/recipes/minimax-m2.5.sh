#!/usr/bin/env bash
# MiniMax-M2.5: launch/recipes/minimax-m2.5.sh h200|b200 [further flags]. By our worker alone: SGLang 0.5.23 has no
# set_dflash_layers_to_capture for it, which sglang_dflash/host/target_models.py adds.
source "$(dirname "$0")/gpu.sh"
flags=(
  --model-path MiniMaxAI/MiniMax-M2.5
  --speculative-algorithm DFLASH
  --speculative-draft-model-path z-lab/MiniMax-M2.5-DFlash # its block is the one in its config
  --tp-size 4 # 230 GB of weights in fp8; over 8 an expert's share is no multiple of the scales' 128
  --trust-remote-code # of the target; no draft's code is run
)
exec python3 -m sglang.launch_server $DFLASH_FLAGS "${flags[@]}" "$@"
