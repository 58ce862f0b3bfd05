"""Documents of measurements: the header that each begins with, and how they are saved.

Paths of this machine are left out.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_dflash.servers import machine


def head(benchmark: str, command: str) -> dict[str, Any]:
    """What every measured document begins with: what it is, how far it proves something, and where it was seen."""
    gpus = machine.gpus()
    return {
        "benchmark": benchmark,
        "level": f"G: seen on {gpus[0].split(',')[0]}" if gpus else "C: seen on CPU",
        "when": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
        "commit": machine.commit(),
        "command": portable(command),
        "machine": machine.describe(),
        "versions": machine.versions(),
    }


def write(document: Mapping[str, Any], path: Path) -> str:
    """Save the document; returns the path as people write it from the repository."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    return str(path).removeprefix(f"{machine.CHECKOUT}/")


def file_name(benchmark: str) -> str:
    """Of a document that is kept: when, where and on which code it was measured, and what."""
    return f"{datetime.now(UTC):%Y-%m-%d}-{machine.kind()}-{machine.commit()}-{benchmark}.json"


def portable(text: str) -> str:
    """`text` with paths as seen from the repository; of a path outside it, the last part."""
    text = text.replace(sys.executable, "python").replace(f"{machine.CHECKOUT}/", "")
    return re.sub(r"(?<![\w./])(?:/[\w.@+-]+)*/([\w.@+-]+)", r"\1", text)


def inherited() -> dict[str, str]:
    """What this program's own environment tells a server."""
    return {k: v for k, v in os.environ.items() if k.startswith(("SGLANG_", "OMP_", "CUDA_VISIBLE_DEVICES"))}
