"""Step times by batch size and width, measured at start-up and corrected by the times of real steps."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

# The relative error of a real step is the step's time divided by the estimate, minus 1.
COMMON = 0.1  # fraction of the error by which the times of all widths are corrected
OWN = 0.03  # further fraction of the error by which the time of the step's own width is corrected
MOST = 0.15  # bound of the error before a width has had RECENT steps, because some steps take twice as long as usual
# The median error of this many last steps of a width is used. The median time of as many first steps replaces the time
# from start-up.
RECENT = 5
FASTER = 4.0  # bound of the factor by which one time becomes shorter at once
NEAR = 0.1  # relative difference up to which the first real times replace nothing

Agree = Callable[[np.ndarray], None]  # overwrites an array in place with the same values on every rank


class StepCost:
    """Estimator of the time T(B, w) of a step with B requests at width w, in seconds.

    Real steps include costs that start-up did not measure: the scheduler, longer contexts, other load on the machine.
    These costs are a similar share of a step at every width, so all widths are corrected. An error of the start-up
    measurement may concern one width only, so the step's own width is corrected further. The first real times of a
    width replace the time from start-up, which may be wrong by any factor. Ranks measure different times but must
    choose the same width. So corrections are used only after `settle` has made them equal on all ranks.

    Attributes:
        has_news: a real time has replaced one from start-up since the last `settle`. Equal on all ranks, because it
            depends on numbers of steps only.
    """

    def __init__(self, widths: Sequence[int], seconds: Mapping[int, Sequence[float]], agree: Agree) -> None:
        """`widths`: ascending; `seconds`: for each measured batch size, the time at each width."""
        self.widths, self.sizes, self.agree = tuple(widths), sorted(seconds), agree
        # A step of fewer requests takes no longer. If it was measured longer, the machine was busy at that moment.
        times_SW = np.array([seconds[size] for size in self.sizes], dtype=float)
        self.measured_SW = np.minimum.accumulate(times_SW[::-1])[::-1].tolist()
        self.launch_SW = [row[:] for row in self.measured_SW]
        # The first real times of each width at each size, up to RECENT of them, divided by the time from start-up.
        self.first_SW: list[list[list[float]]] = [[[] for _ in self.widths] for _ in self.sizes]
        # Number of real steps. For each size and width: number of real steps of about this size, and when the last one
        # was counted.
        self.n_observed = 0
        self.n_SW, self.last_SW = ([[0] * len(self.widths) for _ in self.sizes] for _ in range(2))
        self.errors_W = [deque[float](maxlen=RECENT) for _ in self.widths]  # relative errors of the last steps
        self.look_up(lambda n_requests, width: n_requests)
        self.settle()

    def look_up(self, padded: Callable[[int, int], int]) -> None:
        """Take estimates at the batch size that runs, which may be padded, instead of at the number of requests.

        Args:
            padded: function of (number of requests, width) that returns the batch size that runs, for example the next
                captured one.
        """
        # parts_WN[w][n]: (index of a measured size, weight) pairs of a linear interpolation at the size that runs.
        ran_WN = [[padded(n, width) for n in range(self.sizes[-1] + 1)] for width in self.widths]
        weight_SWN = [np.interp(ran_WN, self.sizes, one) for one in np.eye(len(self.sizes))]
        self.parts_WN = [
            [[(i, x) for i, x in enumerate(weight_S) if x] for weight_S in weight_NS]
            for weight_NS in np.stack(weight_SWN, axis=-1).tolist()
        ]

    def settle(self) -> None:
        """Make `of` return the corrected times, equal on all ranks. All ranks must call this after the same step."""
        agreed_SW = np.array(self.measured_SW, dtype=float)
        self.agree(agreed_SW)
        self.measured_SW, self.agreed_SW = agreed_SW.tolist(), agreed_SW.tolist()
        self.has_news = False

    def of(self, n_requests: int) -> list[float]:
        """Return the seconds of a step at each width. Batches above the largest measured size get that size's times."""
        return self._of(n_requests, self.agreed_SW)

    def _of(self, n_requests: int, seconds_SW: Sequence[Sequence[float]]) -> list[float]:
        n = min(n_requests, self.sizes[-1])
        return [sum(weight * seconds_SW[i][w] for i, weight in of_N[n]) for w, of_N in enumerate(self.parts_WN)]

    def _parts(self, n_requests: int, width: int) -> list[tuple[int, float]]:
        return self.parts_WN[self.widths.index(width)][min(n_requests, self.sizes[-1])]

    def nearest(self, n_requests: int, width: int) -> tuple[int, int]:
        """Return the index of the measured size nearest to the batch that runs, and the index of `width`.

        Of two equally near sizes, take the larger.
        """
        i, _ = max(reversed(self._parts(n_requests, width)), key=lambda part: part[1])
        return i, self.widths.index(width)

    def observe(self, n_requests: int, width: int, seconds: float) -> None:
        """Correct the estimates with the time of a real step, `seconds`."""
        w, parts = self.widths.index(width), self._parts(n_requests, width)
        errors = self.errors_W[w]
        errors.append(seconds / self._of(n_requests, self.measured_SW)[w] - 1)
        error = median(errors) if len(errors) == RECENT else min(max(errors[-1], -MOST), MOST)
        self.n_observed += 1
        nearest, _ = self.nearest(n_requests, width)
        self.n_SW[nearest][w] += 1
        self.last_SW[nearest][w] = self.n_observed
        for i, weight in parts:
            self.measured_SW[i] = [(1 + COMMON * weight * error) * known for known in self.measured_SW[i]]
            self.measured_SW[i][w] *= 1 + OWN * weight * error
            if len(self.first_SW[i][w]) < RECENT:
                self._replace(i, w, seconds / self._of(n_requests, self.launch_SW)[w])

    def _replace(self, i: int, w: int, ratio: float) -> None:
        """Use one of the first real times of width index `w` at size index `i`, as a ratio to the time from start-up.

        - The first real time replaces the time from start-up only if it is shorter, since disturbances hardly make
          steps shorter.
        - After two real times, the shorter one replaces it. After RECENT real times, their median does.
        - Small differences replace nothing, because a time from start-up is the result of more steps.
        - If no other width at this size has RECENT real times, widths without a real time get the same ratio, because
          most errors of start-up concern all widths.
        """
        first, times_W, launch_W = self.first_SW[i][w], self.measured_SW[i], self.launch_SW[i]
        first.append(ratio)
        is_full = len(first) == RECENT
        self.has_news |= is_full or len(first) <= 2
        ratio, known = median(first) if is_full else min(first), times_W[w] / launch_W[w]
        if abs(ratio / known - 1) > NEAR and (is_full or len(first) == 2 or ratio < known):
            times_W[w] = max(ratio, known / FASTER) * launch_W[w]
            self.errors_W[w].clear()  # the errors belong to the time that is replaced
        if is_full and abs(ratio - 1) > NEAR and sum(len(others) == RECENT for others in self.first_SW[i]) == 1:
            for v, others in enumerate(self.first_SW[i]):
                if v == w or not others:
                    self.errors_W[v].clear()
                    times_W[v] = max(ratio, 1 / FASTER) * launch_W[v]

    def n_real(self, n_requests: int, width: int) -> int:
        """Return the number of real steps at the measured size nearest to `n_requests`."""
        i, w = self.nearest(n_requests, width)
        return self.n_SW[i][w]

    def last(self, n_requests: int, width: int) -> int:
        """Return the number of the last real step at the nearest measured size, counted from 1; 0: none."""
        i, w = self.nearest(n_requests, width)
        return self.last_SW[i][w]

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
