#!/usr/bin/env bash
# MiniMax-M2.5: not with SGLang 0.5.23, neither by our worker nor by its own. Its draft is z-lab/MiniMax-M2.5-DFlash.
echo "MiniMax-M2.5: SGLang 0.5.23 cannot capture its features (MiniMaxM2ForCausalLM has no" \
  "set_dflash_layers_to_capture), so no DFLASH worker can serve it; serve it without --speculative-algorithm" >&2
exit 1
