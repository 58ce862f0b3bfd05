"""What a step takes: measured at launch, corrected by real steps."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

COMMON = 0.1  # of a step's error by which every width is corrected
OWN = 0.03  # of it by which the step's own width is corrected besides
MOST = 0.15  # of a step's time: an error counts as no larger, for some steps take twice as long


Agree = Callable[[np.ndarray], None]  # writes the same on every rank into an array, in place


class StepCost:
    """T(B, w) in seconds.

    Real steps show what launch did not: the scheduler, longer contexts, a busy machine. As a share of a step that is
    much the same at every width; what launch got wrong about one width is its own. Ranks read their own clocks and must
    decide alike, so corrections count once the ranks have agreed on them.
    """

    def __init__(self, widths: Sequence[int], seconds: Mapping[int, Sequence[float]], agree: Agree) -> None:
        """`seconds`: by batch size, one per width."""
        self.widths, self.sizes, self.agree = tuple(widths), sorted(seconds), agree
        self.measured_SW = np.array([seconds[size] for size in self.sizes], dtype=float)
        # The weight of each size's costs in those of n requests: linear between two sizes.
        n = np.arange(self.sizes[-1] + 1)
        self.weight_NS = np.stack([np.interp(n, self.sizes, one) for one in np.eye(len(self.sizes))], axis=1)
        self.settle()

    def settle(self) -> None:
        """From now on what was measured counts. Called by all ranks after the same steps."""
        self.agree(self.measured_SW)
        self.agreed_SW = self.measured_SW.copy()

    def of(self, n_requests: int) -> list[float]:
        """Seconds per step, one per width; a batch larger than measured costs as the largest."""
        return (self.weight_NS[min(n_requests, self.sizes[-1])] @ self.agreed_SW).tolist()

    def observe(self, n_requests: int, width: int, seconds: float) -> None:
        """A real step."""
        w, weight_S = self.widths.index(width), self.weight_NS[min(n_requests, self.sizes[-1])]
        error = seconds / (weight_S @ self.measured_SW[:, w]) - 1
        error_S = weight_S * min(max(error, -MOST), MOST)
        self.measured_SW *= 1 + COMMON * error_S[:, None]
        self.measured_SW[:, w] *= 1 + OWN * error_S

    def by_size(self) -> dict[str, dict[str, float]]:
        """Seconds by requests, then by width; as JSON has it."""
        return {
            str(size): {str(width): round(s, 6) for width, s in zip(self.widths, self.of(size), strict=True)}
            for size in self.sizes
        }


def table(seconds: dict[str, dict[str, float]]) -> str:
    """By requests, then by width, in milliseconds."""
    cells = ([size, *(f"{1e3 * s:.2f} ms" for s in by_width.values())] for size, by_width in seconds.items())
    rows = [["", *next(iter(seconds.values()))], *cells]
    return "\n".join("".join(f"{cell:>10}" for cell in row) for row in rows)
