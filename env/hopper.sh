# H100, H200: source env/hopper.sh, then python -m sglang.launch_server $DFLASH_FLAGS ...
# The draft also gets fa3, which computes both full and sliding draft layers, and needs no host sync per step.
export SGLANG_DFLASH_WORKER="${SGLANG_DFLASH_WORKER:-plugin}"
export DFLASH_FLAGS="--attention-backend fa3"
