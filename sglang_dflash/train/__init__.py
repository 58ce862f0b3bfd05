"""Trainer of DFlash drafts for Transformers causal LMs, and of the tiny pairs in this package.

    sglang-dflash train draft --target PATH --data FILE --out DIR
    sglang-dflash train tiny --out DIR

The trainer runs on CPU or GPU, in one process or several. It needs sglang only for chats with tools. All random numbers
are seeded. An interrupted run resumes from its checkpoint. The guide is sglang_dflash/docs/training.md.
"""
