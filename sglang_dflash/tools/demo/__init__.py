"""Demo without a GPU: SGLang serves a tiny pair, or SmolLM2-135M-Instruct, with this plugin.

    sglang-dflash demo            answers a few questions, then serves on port 30000 until Ctrl-C
    sglang-dflash demo --once     answers the questions and exits
    sglang-dflash demo --web      serves a page for questions, and shows the source of each token
    sglang-dflash demo --smollm2  serves a real model, after a download of 93 MB

Two servers start in parallel, one with speculation and one without. Both get every question. The source of a token is a
drafted block, an n-gram copy, or the target.
"""
