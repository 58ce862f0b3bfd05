"""The CPU platform: stock SGLang on a machine with no accelerator, in plain PyTorch.

SGLang loads `activate` in every one of its processes, so this file imports almost nothing. `platform` implements
SGLang's platform interface, `install` puts torch definitions in place of GPU-only kernels, and every other file defines
one topic. The platform is independent of DFlash's worker: it serves SGLang without speculation, its own DFLASH worker,
and this plugin's.
"""

import os
import sys

REHEARSE = "SGLANG_DFLASH_REHEARSE"


def activate() -> str | None:
    """Return the name of the platform class; None if an accelerator, or SGLang's own CPU engine, should serve."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    import torch

    rehearsed = os.environ.get(REHEARSE, "off") != "off"
    if torch.accelerator.is_available():
        if rehearsed:  # SGLang logs an error raised here and continues without the plugin
            sys.exit(f"{REHEARSE} emulates a GPU, and this machine has one; unset it")
        return None
    if rehearsed:
        # Triton reads it at import. No kernel has run yet, and later processes inherit it.
        os.environ["TRITON_INTERPRET"] = "1"
        # PyTorch then runs SGLang's compiled functions uncompiled, with a launch for each operation.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        return "sglang_dflash.rehearsal.platform.RehearsalPlatform"
    return "sglang_dflash.cpu.platform.CpuPlatform"
