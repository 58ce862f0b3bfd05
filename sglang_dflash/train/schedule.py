"""Learning rate and end of a run: by a number of steps, or by a time limit."""

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """Learning rate and end of a run at `step`, counted from 0, after `seconds` of training and evaluation."""

    reads_clock: bool  # whether the weights depend on `seconds`

    @property
    def total(self) -> float:
        """Return the length of the run, in steps or seconds."""

    def done(self, step: int, seconds: float) -> float:
        """Return the part of `total` that is done."""

    def is_over(self, step: int, seconds: float) -> bool:
        """Return whether the run ends before this step."""

    def rate(self, step: int, seconds: float) -> float:
        """Return the learning rate of this step."""

    def place(self, step: int, seconds: float) -> str:
        """Return the progress before this step, for a user."""


@dataclass(frozen=True)
class Decay:
    """Linear warm-up, and a cosine from the peak to a fraction of it."""

    warmup_steps: int
    final_rate: float  # fraction of the peak

    def rate(self, peak: float, step: int, share: float) -> float:
        """Return the rate at a step of a cycle, counted from 0. `share` is the fraction of the cycle that is over."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        return peak * warmup * (self.final_rate + (1 - self.final_rate) * cosine)


@dataclass(frozen=True)
class BySteps:
    """Schedule of one or more cosine cycles, each with a number of steps."""

    cycles: tuple[tuple[int, float], ...]  # (number of steps, peak learning rate)
    decay: Decay
    reads_clock = False

    @property
    def total(self) -> int:
        return sum(steps for steps, _ in self.cycles)

    def done(self, step: int, seconds: float) -> float:
        return step

    def is_over(self, step: int, seconds: float) -> bool:
        return step >= self.total

    def rate(self, step: int, seconds: float) -> float:
        """See `Schedule`. Raises ValueError after the last step."""
        first = 0
        for n_steps, peak in self.cycles:
            if (at := step - first) < n_steps:
                return self.decay.rate(peak, at, at / n_steps)
            first += n_steps
        raise ValueError(f"the recipe has {first} steps, counted from 0; there is no step {step}")

    def place(self, step: int, seconds: float) -> str:
        return f"step {step:,} of {self.total:,}"


@dataclass(frozen=True)
class ByTime:
    """Schedule of one cosine cycle with a time limit. The warm-up has a number of steps.

    The weights depend on the speed of the machine. So a repeated run gives similar weights, not the same bits.
    """

    total: float  # seconds
    peak: float
    decay: Decay
    reads_clock = True

    def done(self, step: int, seconds: float) -> float:
        return min(seconds, self.total)

    def is_over(self, step: int, seconds: float) -> bool:
        return seconds >= self.total

    def rate(self, step: int, seconds: float) -> float:
        return self.decay.rate(self.peak, step, seconds / self.total)

    def place(self, step: int, seconds: float) -> str:
        return f"step {step:,}, after {seconds:,.0f} of {self.total:,.0f} s"
