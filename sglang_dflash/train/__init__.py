"""Train DFlash drafts: for any Transformers causal LM, or a whole tiny pair from nothing.

    sglang-dflash train draft --target PATH --data FILE --out DIR
    sglang-dflash train tiny --out DIR

Runs on CPU or GPU, on one process or on several, without sglang. Everything is seeded, and an interrupted run goes on
where it stopped. The guide is sglang_dflash/docs/training.md.
"""
