"""How long decode steps take, as far as the host knows without waiting for the device.

OutcomeClock    for a device beside the host: a step has ended when its outcome reaches the host
DecisionClock   where the host computes: a step has run when it was launched, and ends with the next decision

Under the overlap schedule the host launches a step before it reads the outcome of the one before. Where the host
computes, that outcome is read when the next step has run, so the time between two outcomes is that of a later step: a
rare wide step between narrow ones would seem as short as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

Tell = Callable[[int, int, float], None]  # requests, width, seconds


class Step(NamedTuple):
    n_requests: int
    width: int
    epoch: int  # how often something else than decoding had been launched before it
    expected_s: float


class StepClock(Protocol):
    def decided(self, step: Step, now_s: float) -> None:
        """A step is about to be launched."""

    def known(self, step: Step, now_s: float) -> None:
        """Its outcome has reached the host; in the order of the decisions."""

    def interrupt(self) -> None:
        """Something else than decoding runs now."""


class DecisionClock:
    """From one decision to the next, if nothing else ran in between and no request ended: what the host does for one
    that ends is no part of a step, and where few run it is most of what it does.
    """

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.running: tuple[Step, float] | None = None

    def decided(self, step: Step, now_s: float) -> None:
        if self.running is not None:
            ran, began_s = self.running
            if ran.n_requests == step.n_requests:
                self.tell(ran.n_requests, ran.width, now_s - began_s)
        self.running = step, now_s

    def known(self, step: Step, now_s: float) -> None:
        return

    def interrupt(self) -> None:
        self.running = None


class OutcomeClock:
    """From one outcome to the next. That time is the later step's, or, where the host is slower than the device, that
    of the step it launches meanwhile. So it is told where steps are alike, and of one step between two that are alike:
    all but their time is its own.

    A prompt is launched before the outcome of the step before it is known, and is read between that step and the next:
    steps of two epochs are never alike.
    """

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.last = deque[tuple[Step, float]](maxlen=2)  # with nothing but decode steps in between

    def decided(self, step: Step, now_s: float) -> None:
        return

    def known(self, step: Step, now_s: float) -> None:
        if self.last and alike(self.last[-1][0], step):
            self.tell(step.n_requests, step.width, now_s - self.last[-1][1])
        elif len(self.last) == 2:
            (first, first_s), (between, _) = self.last
            if alike(first, step) and between.n_requests == step.n_requests:
                self.tell(between.n_requests, between.width, now_s - first_s - step.expected_s)
        self.last.append((step, now_s))

    def interrupt(self) -> None:
        self.last.clear()


def alike(one: Step, other: Step) -> bool:
    """The same requests' number, width and epoch."""
    return one[:3] == other[:3]
