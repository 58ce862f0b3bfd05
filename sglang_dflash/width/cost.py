"""What a step takes at each width and batch size: measured at launch, corrected by real steps.

Knows nothing of SGLang or torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np


class Cost(Protocol):
    def of(self, n_requests: int) -> np.ndarray:
        """Seconds per step, one per width."""

    def observe(self, n_requests: int, width: int, seconds: float) -> None:
        """A real step."""

    def settle(self) -> None:
        """From now on what was observed counts."""

    def by_size(self) -> dict[str, dict[str, float]]:
        """Seconds by requests, then by width."""


class StepCost:
    """T(B, w) in seconds: measured at launch for some batch sizes, corrected by real steps.

    Real steps see what launch did not: the scheduler, longer contexts, a busy machine. As a share of a step that is
    much the same for every width, and it changes; what launch got wrong about one width is its own, and stays. A step's
    error is shared between the two by how uncertain each still is, as a Kalman filter does that takes them for
    independent.

    Ranks read their own clocks, and must decide the same: what was measured counts once they have agreed on it.
    """

    # Standard deviations, in shares of a step's time.
    NOISE = 0.05  # of one step
    UNSEEN = 0.5  # of what launch did not see, at all widths
    LAUNCH = 0.05  # of what launch says of one width against the others
    DRIFT = 0.01  # of all widths of a batch size, from step to step
    OWN_DRIFT = 0.001  # of one width against the others, from step to step
    DISTURBED = 2  # standard deviations; a step further off counts as no further: now and then one takes twice as long

    def __init__(
        self,
        widths: Sequence[int],
        seconds: Mapping[int, Sequence[float]],
        agree: Callable[[np.ndarray], None] = lambda seconds: None,
    ) -> None:
        """
        Args:
            seconds: for each measured batch size, one per width.
            agree: writes the same values on every rank into an array, in place.
        """
        self.widths = tuple(widths)
        self.sizes = sorted(seconds)
        self.measured_SW = np.array([seconds[size] for size in self.sizes], dtype=float)
        self.common_S = np.full(len(self.sizes), self.UNSEEN**2)  # variances: of what all widths have in common,
        self.own_SW = np.full(self.measured_SW.shape, self.LAUNCH**2)  # and of what is a width's own
        self.agree = agree
        self.settle()

    def settle(self) -> None:
        """From now on what was measured counts. Called by all ranks after the same steps."""
        self.agree(self.measured_SW)
        self.agreed_SW = self.measured_SW.copy()

    def of(self, n_requests: int) -> np.ndarray:
        """Seconds per step, one per width."""
        return self._at(self.agreed_SW, n_requests)

    def observe(self, n_requests: int, width: int, seconds: float) -> None:
        """A real step."""
        w = self.widths.index(width)
        expected = self._at(self.measured_SW, n_requests)[w]
        error = seconds / expected - 1
        i, share = self._between(n_requests)
        for size, weight in ((i, 1 - share), (i + 1, share)):
            if weight:
                self._correct(size, w, weight, error)

    def _correct(self, size: int, w: int, weight: float, error: float) -> None:
        """By `weight` of what a batch of just this size would say."""
        self.common_S[size] += self.DRIFT**2
        self.own_SW[size] += self.OWN_DRIFT**2
        common, own = self.common_S[size], self.own_SW[size, w]
        variance = common + own + self.NOISE**2
        most = self.DISTURBED * variance**0.5
        error = min(max(error, -most), most)
        gain = weight / variance
        self.measured_SW[size] *= 1 + gain * common * error
        self.measured_SW[size, w] *= 1 + gain * own * error
        self.common_S[size] *= 1 - gain * common
        self.own_SW[size, w] *= 1 - gain * own

    def by_size(self) -> dict[str, dict[str, float]]:
        """Seconds by requests, then by width; as JSON has it."""
        return {
            str(size): {str(width): round(s, 6) for width, s in zip(self.widths, self.of(size).tolist(), strict=True)}
            for size in self.sizes
        }

    def _at(self, seconds_SW: np.ndarray, n_requests: int) -> np.ndarray:
        i, share = self._between(n_requests)
        return seconds_SW[i] * (1 - share) + seconds_SW[i + 1] * share if share else seconds_SW[i]

    def _between(self, n_requests: int) -> tuple[int, float]:
        """The measured size at or below, and how far towards the next; sizes outside are as far as measured."""
        i = bisect_right(self.sizes, n_requests) - 1
        if i < 0:
            return 0, 0.0
        if i + 1 == len(self.sizes):
            return i, 0.0
        return i, (n_requests - self.sizes[i]) / (self.sizes[i + 1] - self.sizes[i])


def table(seconds: dict[str, dict[str, float]]) -> str:
    """By requests, then by width, in milliseconds."""
    rows = [["", *next(iter(seconds.values()))]]
    rows += [[size, *(f"{1e3 * s:.2f} ms" for s in by_width.values())] for size, by_width in seconds.items()]
    return "\n".join("".join(f"{cell:>10}" for cell in row) for row in rows)
