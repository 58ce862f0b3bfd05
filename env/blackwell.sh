# B200, B300: source env/blackwell.sh, then python -m sglang.launch_server $DFLASH_FLAGS ...
# trtllm_mha would read the context of a full draft layer once per block slot, so the draft gets fa4, as on model cards.
export SGLANG_DFLASH_WORKER="${SGLANG_DFLASH_WORKER:-plugin}"
export DFLASH_FLAGS="--attention-backend trtllm_mha --speculative-draft-attention-backend fa4"
