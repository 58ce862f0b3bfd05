"""CPU platform: SGLang on a machine without an accelerator, in plain PyTorch.

SGLang loads `activate` in each of its processes, so this file imports almost nothing. `platform` implements SGLang's
platform interface. `install` replaces GPU-only kernels by the torch definitions in most of the other files here.
The platform does not depend on DFlash's worker: it serves without speculation, with SGLang's DFLASH worker, or with
this plugin's.
"""

import os
import sys

from sglang_dflash.engine.host.contract import other_version
from sglang_dflash.engine.host.loading import REHEARSE, load_before_resolution
from sglang_dflash.engine.host.other_sglang import guard_resolution


def activate() -> str | None:
    """Return the name of the platform class, see `platform_name`.

    On every machine this also makes SGLang load plugins before it resolves arguments. Beside an SGLang of another
    version there is no platform, and launches with DFLASH are refused.
    """
    name = platform_name()  # first, because the next lines may import Triton, which reads variables set here
    if mismatch := other_version():
        guard_resolution(mismatch)
        return None
    load_before_resolution()
    return name


def platform_name() -> str | None:
    """Return the name of the platform class; None if an accelerator or SGLang's own CPU engine serves."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    import torch

    rehearsed = os.environ.get(REHEARSE, "off") != "off"
    if torch.accelerator.is_available():
        if rehearsed:  # SGLang logs an error raised here and continues without the plugin
            sys.exit(f"{REHEARSE} emulates a GPU, and this machine has one; unset it")
        return None
    if rehearsed:
        # Triton reads the variable when a kernel's module is imported. Child processes inherit the variable.
        os.environ["TRITON_INTERPRET"] = "1"
        # With this variable PyTorch runs SGLang's compiled functions uncompiled, one launch per operation.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        return "sglang_dflash.platforms.rehearsal.platform.RehearsalPlatform"
    return "sglang_dflash.platforms.cpu.platform.CpuPlatform"
