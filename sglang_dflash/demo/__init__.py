"""The demo: the tiny pair served by stock SGLang with this plugin, answering through the OpenAI API, without a GPU.

    sglang-dflash demo            asks a few questions, then keeps serving on port 30000 until Ctrl-C
    sglang-dflash demo --once     asks and leaves
    sglang-dflash demo --web      a page where you ask, and see which tokens came from a block, a copy or the target

Two servers start at the same time, one with speculation and one without, and every question goes to both.
"""
