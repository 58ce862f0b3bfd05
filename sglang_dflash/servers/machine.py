"""What a benchmark ran on: machine, versions, commit. Nothing that names the host or a path on it."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

CHECKOUT = Path(__file__).parents[2]  # where the package is not installed into site-packages
PACKAGES = ("sglang", "torch", "transformers", "triton", "flashinfer-python", "sglang-kernel", "sglang-dflash")


def cpu_model() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read(), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def gpus() -> list[str]:
    """Name, driver and memory of every NVIDIA GPU; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    return listed.stdout.strip().splitlines() if listed.returncode == 0 else []


def describe() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def kind() -> str:
    """A short name for file names: `cpu-2core`, `nvidia-h200`."""
    names = gpus()
    label = names[0].split(",")[0] if names else f"cpu-{len(os.sched_getaffinity(0))}core"
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str:
    """The short commit, with `-dirty` when tracked files differ from it; `unknown` outside a git checkout."""
    if not (CHECKOUT / ".git").exists():  # an installed package may lie inside another repository
        return "unknown"
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"],
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return described.stdout.strip() if described.returncode == 0 else "unknown"
