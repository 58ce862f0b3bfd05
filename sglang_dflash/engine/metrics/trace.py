"""Trace of decode steps with `SGLANG_DFLASH_WIDTH_TRACE`: one JSON line per step, in one file per process."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_dflash.engine.stages.copier import CopyStep, TextCopies
from sglang_dflash.engine.stages.stages import Stages, with_methods
from sglang_dflash.engine.step import Plan
from sglang_dflash.engine.width.chooser import Trace as Outcome


def traced(stages: Stages, folder: Path | None) -> tuple[Stages, Outcome | None]:
    """Return the stages, changed to record where copies begin, and a function that writes each outcome into `folder`.

    If `folder` is None, return unchanged stages and None.
    """
    if folder is None:
        return stages, None
    copier = stages.copier if isinstance(stages.copier, TextCopies) else None
    trace = Trace(folder, copier)
    if copier is not None:
        stages = stages._replace(copier=with_methods(copier, copy=trace.copy))
    return stages, trace.add


class Trace:
    """Writer of one JSON line per step, into a file per process, because ranks must not share a file.

    `places` has one entry per step in flight, oldest first: the slot of each block after which the copy begins
    (`Copied.place_B`). Without a copier, `places` stays empty.
    """

    def __init__(self, folder: Path, copier: TextCopies | None) -> None:
        """Open a new file in `folder`; `copier`: None if the server makes no n-gram copies."""
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
        self.copier = copier
        self.places = deque[torch.Tensor]()

    def copy(self, plan: Plan, drafts_BN: torch.Tensor) -> CopyStep:
        """Run the copier, and start the transfer of `place_B` to the host."""
        assert self.copier is not None
        step = self.copier.copy(plan, drafts_BN)
        place_B = torch.zeros(plan.n_requests) if step.made is None else step.made[0].place_B
        self.places.append(place_B.to("cpu", non_blocking=True))
        return step

    def add(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int], now_s: float) -> None:
        """Write a step's line. With a copier, field `copied` has each request's number of accepted copied drafts."""
        accepted = dict(zip(rids, n_accepted_B, strict=True))
        line = {"s": round(now_s, 6), "width": width, "accepted": accepted}
        if self.copier:
            places = self.places.popleft().tolist()
            line["copied"] = {rid: max(n - place, 0) for (rid, n), place in zip(accepted.items(), places, strict=True)}
        self.file.write(json.dumps(line) + "\n")
