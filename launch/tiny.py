"""The tiny pairs and their command line (`sglang_dflash.bench.tiny`), and where a checkout's runs leave files."""

from pathlib import Path

from sglang_dflash.bench.tiny import (
    ARMS,
    DENSE,
    DENSE_2,
    ENV,
    FLAGS,
    HYBRID,
    HYBRID_2,
    HYBRID_FLAGS,
    Arm,
    Pair,
    command,
    environment,
    require_worker,
)

__all__ = [
    "ARMS", "DENSE", "DENSE_2", "ENV", "FLAGS", "HYBRID", "HYBRID_2", "HYBRID_FLAGS", "RESULTS", "ROOT", "RUN_DIR",
    "Arm", "Pair", "command", "environment", "require_worker",
]  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
RUN_DIR = ROOT / ".run"  # logs; ignored by git
RESULTS = ROOT / "launch" / "results"  # documents that pages quote
