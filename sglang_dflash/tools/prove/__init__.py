"""Checks of an installed package on this machine, run by pytest: `sglang-dflash prove`. See docs/prove.md.

    plugin      pytest hooks of the processes that run checks: descriptions, time limits, findings of checks
    report      pytest hooks of the process that collects results: table and JSON document
    machine     the GPU, real or emulated, and flags that serve a pair on it
    served      servers, prompts, and the PyTorch reference's answers
    environment, inside, ops, draft_graph, outside
                the checks, functions called `check_...`; each file's checks run in a separate process
    distribution
                comparison of two sampling distributions
    probe       recorder of the worker in the scheduler's process (`SGLANG_DFLASH_PROBE=1`)

No check needs the network or a checkout.
"""
