"""Check of the installation: versions, entry points, hooks, names used from SGLang, and a matrix product on the GPU."""

import importlib
import importlib.util
import platform

import torch

from sglang_dflash.tools.check import findings, launch
from sglang_dflash.tools.prove.machine import Place
from sglang_dflash.tools.prove.plugin import Finding, Found, check

# Modules that servers and checks import.
MODULES = ("sglang", "torch", "triton", "transformers", "httpx", "psutil", "rich", "huggingface_hub", "fastapi", "zmq")
VERSIONED = ("sglang", "torch", "triton", "transformers", "sglang_dflash")


@check("environment", "versions, entry points, hooks and names of SGLang are as needed", 2, short=True)
def check_environment(place: Place, found: Found) -> None:
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    assert not missing, f"not importable: {', '.join(missing)}; install them, or put them on PYTHONPATH"
    # Versions are read from the modules. Metadata of unpacked packages may be missing, or describe another version.
    versions = {name: importlib.import_module(name).__version__ for name in VERSIONED}
    if place.gpu is not None:
        a = torch.randint(-8, 8, (64, 64), device="cuda").float()
        error = (a @ a - (a.double() @ a.double()).float()).abs().max().item()
        assert error == 0, f"torch computes a product of small integers on this GPU with an error of {error}"
    all_findings = [*findings.installation(), *launch.report([])]
    wrong = [f"{one.name}: {one.text}" for one in all_findings if not one.ok]
    shown = ", ".join(f"{name} {versions[name]}" for name in ("sglang", "torch", "triton"))
    numbers = versions | {"python": platform.python_version(), "cuda": torch.version.cuda, "device": place.device}
    numbers |= {"checks": {one.name: one.text for one in all_findings}}
    found(Finding("; ".join([shown, *wrong]), numbers, not wrong))
