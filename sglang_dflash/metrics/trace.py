"""Every step in a file, for who wants to know of each (`SGLANG_DFLASH_WIDTH_TRACE`)."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_dflash.stages.calls import Calls, Stages
from sglang_dflash.stages.copier import Copier, TextCopies
from sglang_dflash.step import Plan
from sglang_dflash.width.chooser import Trace as Outcome


def traced(stages: Stages, folder: Path | None) -> tuple[Calls, Outcome | None]:
    """What a step calls, and what is told of every outcome: nothing without a folder."""
    if folder is None:
        return stages.calls(), None
    trace = Trace(folder, stages.copier)
    calls = stages.calls()
    return calls._replace(copy=trace.copy) if trace.copier else calls, trace.add


class Trace:
    """Every step's outcome, a line of JSON each, in a file of this process's own: ranks do not share one.

    Invariant, where copies are made: `places` has the steps without an outcome, oldest first.
    """

    def __init__(self, folder: Path, copier: Copier) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
        self.copier = copier if isinstance(copier, TextCopies) else None
        self.places = deque[torch.Tensor]()

    def copy(self, plan: Plan, tokens_BN: torch.Tensor) -> torch.Tensor:
        """The copier's, whose places go to the host before the step's outcome does."""
        assert self.copier is not None
        copied_BN = self.copier.copy(plan, tokens_BN)
        self.places.append(self.copier.place_B.to("cpu", non_blocking=True))
        return copied_BN

    def add(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int], now_s: float) -> None:
        """`copied` are those of the accepted drafts that were copied; they are a step's last ones."""
        accepted = dict(zip(rids, n_accepted_B, strict=True))
        line = {"s": round(now_s, 6), "width": width, "accepted": accepted}
        if self.copier:
            places = self.places.popleft().tolist()
            line["copied"] = {rid: max(n - place, 0) for (rid, n), place in zip(accepted.items(), places, strict=True)}
        self.file.write(json.dumps(line) + "\n")
