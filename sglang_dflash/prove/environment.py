"""The installation: versions, entry points, hooks, SGLang's names; and whether this machine's libraries run at all."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from typing import Any

from sglang_dflash.check import findings, launch
from sglang_dflash.prove.machine import Place
from sglang_dflash.prove.record import Finding, require

# Modules that SGLang or we import, and without which no server starts or answers.
MODULES = ("sglang", "torch", "triton", "transformers", "httpx", "psutil", "rich", "huggingface_hub", "fastapi", "zmq")


def environment(place: Place) -> Finding:
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    numbers = versions() | {"device": place.device, "missing": missing}
    if missing:
        return require(False, f"not importable: {', '.join(missing)}; put them on PYTHONPATH", numbers)
    if place.gpu is not None:
        numbers["product"] = matrix_product()
    found = [*findings.installation(), *launch.report([])]
    numbers["checks"] = {finding.name: finding.text for finding in found}
    wrong = [f"{finding.name}: {finding.text}" for finding in found if not finding.ok]
    shown = ", ".join(f"{name} {numbers[name]}" for name in ("sglang", "torch", "triton"))
    return require(not wrong, "; ".join([shown, *wrong]), numbers)


def versions() -> dict[str, Any]:
    """As the modules themselves say: where they were unpacked there is no metadata, or another version's."""
    import torch

    found = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("sglang", "torch", "triton", "transformers", "sglang_dflash"):
        found[name.removesuffix(".version")] = importlib.import_module(name).__version__
    return found


def matrix_product() -> float:
    """A GPU that computes: the largest error of a small product, which is exact in fp32."""
    import torch

    a = torch.randint(-8, 8, (64, 64), device="cuda").float()
    error = (a @ a - (a.double() @ a.double()).float()).abs().max().item()
    assert error == 0, f"a product of small integers is off by {error}"
    return error
