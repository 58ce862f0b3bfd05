# A machine with no accelerator: source env/cpu.sh, then python -m sglang.launch_server $DFLASH_FLAGS ...
# fp32 throughout, so that answers with and without speculation are the same, token for token.
export CUDA_VISIBLE_DEVICES=
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # more threads than idle cores wait for one another
export SGLANG_DFLASH_WORKER="${SGLANG_DFLASH_WORKER:-plugin}"
export SGLANG_MAMBA_CONV_DTYPE=float32 # otherwise SGLang keeps convolution states in bf16, for every --dtype
export DFLASH_FLAGS="--device cpu --dtype float32 --attention-backend torch_native"
