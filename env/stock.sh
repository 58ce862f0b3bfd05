# SGLang's built-in DFLASH worker in the same installation, for comparison: source env/stock.sh after another profile.
export SGLANG_DFLASH_WORKER=stock
