"""Times of a step's stages, measured in one of every `SAMPLE_EVERY` steps, without waiting for the device.

On a GPU an event is recorded before and after a stage. The two events are read later, when the GPU has reached them.
The time between them is GPU time, including gaps in which the GPU waited for the host. On a CPU the host's time is
measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from sglang_dflash.engine.stages.stages import Stages, with_methods

SAMPLE_EVERY = 32  # steps
# Measured stages; the first one begins a step. Planning and accepting are left out: they take almost no time.
STAGES = ("draft", "copy", "verify", "choose", "commit", "append", "weigh")

P = ParamSpec("P")
R = TypeVar("R")


class Clock(Protocol):
    """Clock of a device."""

    def mark(self) -> Any:
        """Return the current point in the work submitted to the device."""

    def seconds(self, began: Any, ended: Any) -> float | None:
        """Return the seconds between two points; None if the device has not reached the second point."""


class HostClock:
    """Clock of a CPU server, on which the work of a stage has ended when its method returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        return ended - began


class DeviceClock:
    """Clock of a GPU server: events on the current stream."""

    def __init__(self, device: str) -> None:
        self.event = torch.get_device_module(device).Event

    def mark(self) -> torch.Event:
        """Return an event recorded on the current stream."""
        event = self.event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: torch.Event, ended: torch.Event) -> float | None:
        """Return the seconds between two events; None if the device has not reached the second event."""
        return began.elapsed_time(ended) / 1e3 if ended.query() else None


class Interval(NamedTuple):
    """One run of a stage, between two marks of the clock."""

    stage: str
    began: Any
    ended: Any


class StageTimes:
    """Recorder of stage times. `intervals` holds the intervals that `read` has not yielded, oldest first."""

    def __init__(self, clock: Clock, every: int = SAMPLE_EVERY) -> None:
        self.clock, self.every = clock, every
        self.n_steps = 0
        self.intervals = deque[Interval]()

    def timed(self, stage: str, run: Callable[P, R]) -> Callable[P, R]:
        """Wrap `run`, a method of `stage`, to record its time in one of every `every` steps.

        A call of the first stage in `STAGES` begins a step.
        """

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
        """Yield (stage, seconds) of each interval that the device has finished, once, and remove the interval."""
        while self.intervals:
            stage, began, ended = self.intervals[0]
            seconds = self.clock.seconds(began, ended)
            if seconds is None:
                return
            self.intervals.popleft()
            yield stage, seconds


class Timer(Protocol):
    """Object that measures stages, e.g. `StageTimes`."""

    def timed(self, stage: str, run: Callable[P, R]) -> Callable[P, R]:
        """Wrap `run`, a method of `stage`, to record its time."""


def measured(stages: Stages, times: Timer) -> Stages:
    """Return `stages` with each stage in `STAGES` replaced by a duplicate whose methods `times` measures."""
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
    """Return the stages, measured as in `measured`, and the recorder of their times."""
    times = StageTimes(HostClock() if device == "cpu" else DeviceClock(device))
    return measured(stages, times), times
