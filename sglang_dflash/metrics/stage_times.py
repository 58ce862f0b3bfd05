"""How long the stages of a step take: measured in one step of `SAMPLE_EVERY`, and never by waiting.

On a device two events are recorded around a stage, and read some steps later, when the device has passed them: the time
between them is the device's, gaps in which it waited for the host included. On the CPU it is the host's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from sglang_dflash.stages.stages import Stages, with_methods

SAMPLE_EVERY = 32  # steps
# In this order; planning and accepting take next to nothing.
STAGES = ("draft", "copy", "verify", "choose", "commit", "append", "weigh")

P = ParamSpec("P")
R = TypeVar("R")


class Clock(Protocol):
    def mark(self) -> Any:
        """Return this moment of the work that is being given to the device."""

    def seconds(self, began: Any, ended: Any) -> float | None:
        """Return the time between two moments; None while the device has not reached the second."""


class HostClock:
    def mark(self) -> float:
        """Return the host's time, in seconds."""
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        """Return the difference."""
        return ended - began


class DeviceClock:
    def __init__(self, device: str) -> None:
        self.event = torch.get_device_module(device).Event

    def mark(self) -> torch.Event:
        """Return an event that is recorded on the current stream."""
        event = self.event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: torch.Event, ended: torch.Event) -> float | None:
        """Return the time between two events; None while the second has not been reached."""
        return began.elapsed_time(ended) / 1e3 if ended.query() else None


class Interval(NamedTuple):
    stage: str
    began: Any
    ended: Any


class StageTimes:
    """Invariant: `intervals` are those not read yet, oldest first."""

    def __init__(self, clock: Clock, every: int = SAMPLE_EVERY) -> None:
        self.clock, self.every = clock, every
        self.n_steps = 0
        self.intervals = deque[Interval]()

    def timed(self, stage: str, run: Callable[P, R]) -> Callable[P, R]:
        """Return `run`, measured in the steps that are sampled. A step begins with the first stage."""

        def run_timed(*args: P.args, **kwargs: P.kwargs) -> R:
            self.n_steps += stage == STAGES[0]
            if self.n_steps % self.every:
                return run(*args, **kwargs)
            began = self.clock.mark()
            result = run(*args, **kwargs)
            self.intervals.append(Interval(stage, began, self.clock.mark()))
            return result

        return run_timed

    def read(self) -> Iterator[tuple[str, float]]:
        """Yield stages and their seconds, as far as they are known by now; each once."""
        while self.intervals:
            stage, began, ended = self.intervals[0]
            seconds = self.clock.seconds(began, ended)
            if seconds is None:
                return
            self.intervals.popleft()
            yield stage, seconds


class Timer(Protocol):
    def timed(self, stage: str, run: Callable[P, R]) -> Callable[P, R]:
        """Return `run`, measured as `stage`."""


def measured(stages: Stages, times: Timer) -> Stages:
    """Return `stages` with the methods of `STAGES` measured by `times`."""
    timed, copier, verifier = times.timed, stages.copier, stages.verifier
    return stages._replace(
        drafter=with_methods(stages.drafter, draft=timed("draft", stages.drafter.draft)),
        copier=with_methods(copier, copy=timed("copy", copier.copy), weigh=timed("weigh", copier.weigh)),
        verifier=with_methods(
            verifier, verify=timed("verify", verifier.verify), commit=timed("commit", verifier.commit)
        ),
        choice=with_methods(stages.choice, choose=timed("choose", stages.choice.choose)),
        context_kv=with_methods(stages.context_kv, append=timed("append", stages.context_kv.append)),
    )


def time_stages(stages: Stages, device: str) -> tuple[Stages, StageTimes]:
    """Return the stages, measured from now on, and what their times are read from."""
    times = StageTimes(HostClock() if device == "cpu" else DeviceClock(device))
    return measured(stages, times), times
