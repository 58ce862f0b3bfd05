# SGLang's built-in DFLASH worker in the same installation, for comparison: source env/stock.sh, before or after a profile.
export SGLANG_DFLASH_WORKER=stock
