"""Checks of an installed package on this machine, run by pytest: `sglang-dflash prove`. See docs/prove.md.

    plugin      pytest hooks of a process that checks: facts, time limits, findings
    report      pytest hooks of the process that collects: results, the table, the JSON document
    machine     the GPU, real or emulated; flags that serve a pair there
    served      servers, prompts, and plain torch's answers to them
    environment, inside, ops, draft_graph, outside
                the checks, functions called `check_...`; the checks of a file run in a process of their own
    distribution
                the comparison of two sampling distributions
    probe       the worker, recorded inside the scheduler's process (`SGLANG_DFLASH_PROBE=1`)

No check needs the network or a checkout.
"""
