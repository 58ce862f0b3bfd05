"""The CPU platform: stock SGLang on a machine with no accelerator, in plain PyTorch.

SGLang loads `activate` in every one of its processes, so this file imports almost nothing. `platform` is what SGLang
asks, `install` puts torch definitions where SGLang has only GPU kernels, and every other file defines one topic.
Nothing here knows DFlash's worker: the platform serves SGLang without speculation, its own DFLASH worker, and ours.
"""

import os
import sys

REHEARSE = "SGLANG_DFLASH_REHEARSE"


def activate() -> str | None:
    """Name our platform class, or None where an accelerator, or SGLang's own CPU engine, should serve."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    import torch

    rehearsed = os.environ.get(REHEARSE, "off") != "off"
    if torch.accelerator.is_available():
        if rehearsed:  # SGLang logs an error here and goes on without us
            sys.exit(f"{REHEARSE} rehearses a GPU on a machine that has none, and this one has; unset it")
        return None
    if rehearsed:
        # Triton reads it when it is imported: here nothing runs kernels yet, and every process after inherits it.
        os.environ["TRITON_INTERPRET"] = "1"
        # What SGLang compiles runs as it is written, a launch for each operation; PyTorch reads it where it compiles.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        return "sglang_dflash.rehearsal.platform.RehearsalPlatform"
    return "sglang_dflash.cpu.platform.CpuPlatform"
