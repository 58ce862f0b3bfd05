# SGLang's built-in DFLASH worker in the same installation, for comparison: source env/stock.sh, before or after cpu.sh,
# hopper.sh or blackwell.sh.
export SGLANG_DFLASH_WORKER=stock
