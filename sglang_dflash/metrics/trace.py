"""Every step in a file, for who wants to know of each (`SGLANG_DFLASH_WIDTH_TRACE`)."""

import json
import os
from collections.abc import Sequence
from pathlib import Path


class Trace:
    """Every step's outcome, a line of JSON each, in a file of this process's own: ranks do not share one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)

    def add(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int], now_s: float) -> None:
        line = {"s": round(now_s, 6), "width": width, "accepted": dict(zip(rids, n_accepted_B, strict=True))}
        self.file.write(json.dumps(line) + "\n")
