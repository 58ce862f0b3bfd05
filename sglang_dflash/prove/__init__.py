"""One command for the first GPU: `sglang-dflash prove` says what holds on this machine, line by line.

    record      what a check is, and what came of it
    machine     which GPU this is, or which one is rehearsed; flags that serve a pair on it
    apart       a check in a process of its own, with a time limit
    catalogue   all checks, those worth most first
    served      servers, prompts, and what plain torch says of both
    inside      what the probe saw: drafts, padding, steps, stages, memory
    outside     what a client sees: parity, sampling law, speed
    ops         kernels: against their definitions, and their share of the bandwidth
    probe       in the scheduler's process (`SGLANG_DFLASH_PROBE=1`): our worker, watched
    report      the JSON document and the table
    install     entry points for a machine where the package cannot be installed

Nothing here waits for the network, and nothing needs a checkout of the repository.
"""
