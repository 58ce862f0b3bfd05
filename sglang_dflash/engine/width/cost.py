"""Step times by batch size and width, measured at start-up and corrected by the times of real steps."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

# The relative error of a real step is the step's time divided by the estimate, minus 1.
COMMON = 0.1  # fraction of the error by which the times of all widths are corrected
OWN = 0.03  # further fraction of the error by which the time of the step's own width is corrected
MOST = 0.15  # bound of the error before a width has had RECENT steps, because some steps take twice as long as usual
RECENT = 5  # number of last steps of a width whose median error is used

Agree = Callable[[np.ndarray], None]  # overwrites an array in place with the same values on every rank


class StepCost:
    """Estimator of the time T(B, w) of a step with B requests at width w, in seconds.

    Real steps include costs that start-up did not measure: the scheduler, longer contexts, other load on the machine.
    These costs are a similar share of a step at every width, so all widths are corrected. An error of the start-up
    measurement concerns one width, so the step's own width is corrected further. Ranks measure different times but must
    choose the same width. So corrections are used only after `settle` has made them equal on all ranks.
    """

    def __init__(self, widths: Sequence[int], seconds: Mapping[int, Sequence[float]], agree: Agree) -> None:
        """`widths`: ascending; `seconds`: for each measured batch size, the time at each width."""
        self.widths, self.sizes, self.agree = tuple(widths), sorted(seconds), agree
        # A step of fewer requests takes no longer. If it was measured longer, the machine was busy at that moment.
        times_SW = np.array([seconds[size] for size in self.sizes], dtype=float)
        self.measured_SW = np.minimum.accumulate(times_SW[::-1])[::-1].tolist()
        self.errors_W = [deque[float](maxlen=RECENT) for _ in self.widths]  # relative errors of the last steps
        # parts_N[n]: for n requests, (index of a measured size, weight) pairs of a linear interpolation.
        weight_SN = [np.interp(range(self.sizes[-1] + 1), self.sizes, one).tolist() for one in np.eye(len(self.sizes))]
        self.parts_N = [[(i, x) for i, x in enumerate(weight_S) if x] for weight_S in zip(*weight_SN, strict=True)]
        self.settle()

    def settle(self) -> None:
        """Make `of` return the corrected times, equal on all ranks. All ranks must call this after the same step."""
        agreed_SW = np.array(self.measured_SW, dtype=float)
        self.agree(agreed_SW)
        self.measured_SW, self.agreed_SW = agreed_SW.tolist(), agreed_SW.tolist()

    def of(self, n_requests: int) -> list[float]:
        """Return the seconds of a step at each width. Batches above the largest measured size get that size's times."""
        return self._of(n_requests, self.agreed_SW)

    def _of(self, n_requests: int, seconds_SW: Sequence[Sequence[float]]) -> list[float]:
        parts = self.parts_N[min(n_requests, self.sizes[-1])]
        return [sum(weight * seconds_SW[i][w] for i, weight in parts) for w in range(len(self.widths))]

    def observe(self, n_requests: int, width: int, seconds: float) -> None:
        """Correct the estimates with the time of a real step, `seconds`."""
        w = self.widths.index(width)
        errors = self.errors_W[w]
        errors.append(seconds / self._of(n_requests, self.measured_SW)[w] - 1)
        error = median(errors) if len(errors) == RECENT else min(max(errors[-1], -MOST), MOST)
        for i, weight in self.parts_N[min(n_requests, self.sizes[-1])]:
            self.measured_SW[i] = [(1 + COMMON * weight * error) * known for known in self.measured_SW[i]]
            self.measured_SW[i][w] *= 1 + OWN * weight * error

    def by_size(self) -> dict[str, dict[str, float]]:
        """Return the seconds of a step by number of requests and then by width, both as strings for JSON."""
        return {
            str(size): {str(width): round(s, 6) for width, s in zip(self.widths, self.of(size), strict=True)}
            for size in self.sizes
        }


def table(seconds: dict[str, dict[str, float]]) -> str:
    """Format the result of `StepCost.by_size` as a table in milliseconds."""
    cells = ([size, *(f"{1e3 * s:.2f} ms" for s in by_width.values())] for size, by_width in seconds.items())
    rows = [["", *next(iter(seconds.values()))], *cells]
    return "\n".join("".join(f"{cell:>10}" for cell in row) for row in rows)
