"""Trainer of DFlash drafts for Transformers causal LMs, and of the tiny pairs in this package.

    sglang-dflash train draft --target PATH --data FILE --out DIR
    sglang-dflash train tiny --out DIR

Runs on CPU or GPU, in one process or several, without sglang. Everything is seeded. An interrupted run resumes from its
checkpoint. The guide is sglang_dflash/docs/training.md.
"""
