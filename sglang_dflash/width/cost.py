"""Step times by batch size and width: measured at start-up, corrected by real steps."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

COMMON = 0.1  # fraction of a step's relative error by which the times of all widths are corrected
OWN = 0.03  # fraction by which the time of the step's own width is corrected in addition
MOST = 0.15  # bound of relative errors in a width's first steps, because some take twice as long
RECENT = 5  # last steps of a width; once there are so many, their median error counts, without a bound

Agree = Callable[[np.ndarray], None]  # overwrites an array in place with the same values on every rank


class StepCost:
    """Estimator of the step time T(B, w), in seconds.

    Real steps include costs that start-up did not measure: the scheduler, longer contexts, a busy machine. These costs
    are a similar share of a step at every width, but an error of the start-up measurement is specific to its width.
    Ranks have different clocks but must choose the same width, so corrections apply only after the ranks have agreed.
    """

    def __init__(self, widths: Sequence[int], seconds: Mapping[int, Sequence[float]], agree: Agree) -> None:
        """`seconds`: by batch size, one per width, ascending."""
        self.widths, self.sizes, self.agree = tuple(widths), sorted(seconds), agree
        self.measured_SW = [list(seconds[size]) for size in self.sizes]
        self.errors_W = [deque[float](maxlen=RECENT) for _ in self.widths]  # relative errors of the last steps
        # By number of requests: measured sizes and their weights in a linear interpolation.
        weight_SN = [np.interp(range(self.sizes[-1] + 1), self.sizes, one).tolist() for one in np.eye(len(self.sizes))]
        self.parts_N = [[(i, x) for i, x in enumerate(weight_S) if x] for weight_S in zip(*weight_SN, strict=True)]
        self.settle()

    def settle(self) -> None:
        """Apply the corrections measured so far. All ranks must call this after the same steps."""
        agreed_SW = np.array(self.measured_SW, dtype=float)
        self.agree(agreed_SW)
        self.measured_SW, self.agreed_SW = agreed_SW.tolist(), agreed_SW.tolist()

    def of(self, n_requests: int) -> list[float]:
        """Return seconds per step, one per width; those of the largest measured batch for larger batches."""
        return self._of(n_requests, self.agreed_SW)

    def _of(self, n_requests: int, seconds_SW: Sequence[Sequence[float]]) -> list[float]:
        parts = self.parts_N[min(n_requests, self.sizes[-1])]
        return [sum(weight * seconds_SW[i][w] for i, weight in parts) for w in range(len(self.widths))]

    def observe(self, n_requests: int, width: int, seconds: float) -> None:
        """Correct the costs by a real step of `seconds`."""
        w = self.widths.index(width)
        errors = self.errors_W[w]
        errors.append(seconds / self._of(n_requests, self.measured_SW)[w] - 1)
        error = median(errors) if len(errors) == RECENT else min(max(errors[-1], -MOST), MOST)
        for i, weight in self.parts_N[min(n_requests, self.sizes[-1])]:
            self.measured_SW[i] = [(1 + COMMON * weight * error) * known for known in self.measured_SW[i]]
            self.measured_SW[i][w] *= 1 + OWN * weight * error

    def by_size(self) -> dict[str, dict[str, float]]:
        """Return seconds by requests, then by width, as JSON."""
        return {
            str(size): {str(width): round(s, 6) for width, s in zip(self.widths, self.of(size), strict=True)}
            for size in self.sizes
        }


def table(seconds: dict[str, dict[str, float]]) -> str:
    """Format `seconds`, by requests and then by width, as a table of milliseconds."""
    cells = ([size, *(f"{1e3 * s:.2f} ms" for s in by_width.values())] for size, by_width in seconds.items())
    rows = [["", *next(iter(seconds.values()))], *cells]
    return "\n".join("".join(f"{cell:>10}" for cell in row) for row in rows)
