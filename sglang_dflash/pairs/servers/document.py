"""JSON files of measurements (documents), with a header that describes machine, versions and commit.

The header contains neither the host's name nor an absolute path.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from sglang_dflash.pairs.servers.errors import ServerError

CHECKOUT = Path(__file__).parents[3]  # the repository, unless the package is in site-packages
PACKAGES = ("sglang", "torch", "transformers", "triton", "flashinfer-python", "sglang-kernel", "sglang-dflash")


def head(benchmark: str, command: str) -> dict[str, Any]:
    """Return the header of a document: benchmark, level of evidence, time, commit, command, machine and versions."""
    found = gpus()
    return {
        "benchmark": benchmark,
        "level": f"G: seen on {found[0].split(',')[0]}" if found else "C: seen on CPU",
        "when": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
        "commit": commit(),
        "command": portable(command),
        "machine": machine(),
        "versions": versions(),
    }


def require_folder(folder: Path, option: str) -> None:
    """Make a folder, the value of `option`, and check that files can be written there, or raise ServerError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        raise ServerError(f"{folder} cannot be written; give {option} a path in a folder that can")


def write(document: Mapping[str, Any], path: Path) -> str:
    """Save the document as JSON. Returns `path` as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    return str(path)


def portable(text: str) -> str:
    """Return `text` with paths relative to the repository; other absolute paths are reduced to their last part."""
    text = text.replace(sys.executable, "python").replace(f"{CHECKOUT}/", "")
    return re.sub(r"(?<![\w./])(?:/[\w.@+-]+)*/([\w.@+-]+)", r"\1", text)


def inherited() -> dict[str, str]:
    """Return this process's variables that begin with SGLANG_, OMP_ or CUDA_VISIBLE_DEVICES, for a document.

    Servers inherit all variables.
    """
    return {k: v for k, v in os.environ.items() if k.startswith(("SGLANG_", "OMP_", "CUDA_VISIBLE_DEVICES"))}


def cpu_model() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read(), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def gpus() -> list[str]:
    """Return name, driver and memory of every NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    return listed.stdout.strip().splitlines() if listed.returncode == 0 else []


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str:
    """Return the short commit, with `-dirty` if tracked files differ; `unknown` outside a git checkout."""
    if not (CHECKOUT / ".git").exists():  # an installed package may lie inside another repository
        return "unknown"
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"],
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return described.stdout.strip() if described.returncode == 0 else "unknown"
