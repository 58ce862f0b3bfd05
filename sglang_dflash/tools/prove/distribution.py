"""Comparison of two sampling distributions by counting, with a fixed bound.

A draw is the first tokens of one answer. Two sets of draws are compared in several views: the token at each position,
and the first two tokens together. A cell is one outcome of a view with its counts in both sets. The shares of a cell
in both sets must agree within `BOUND` standard errors. Outcomes seen fewer than `RARE` times share one cell, because
their standard error is unreliable.

With n draws in each set, a shift of `detectable(p, n)` in an outcome of probability p is found with probability 0.84.
If both sets come from one distribution, a cell exceeds the bound with probability below 1e-6.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

Draw = tuple[int, ...]  # the first N_POSITIONS token ids of an answer; fewer if it ended earlier
Outcome = tuple[int, ...]

BOUND = 5.0  # standard errors
RARE = 20  # an outcome with fewer draws, in both sets together, has no cell of its own
N_POSITIONS = 4  # number of tokens of a draw
ENDED = -1  # the token of a position after the answer's end
REST: Outcome = (-2,)  # the cell of all rare outcomes


class Cell(NamedTuple):
    """One outcome, counted in both sets."""

    view: str
    outcome: Outcome
    n_a: int  # number of draws with this outcome, among `of_a` draws
    of_a: int
    n_b: int
    of_b: int

    @property
    def n_errors(self) -> float:
        """Return the difference of the two shares in standard errors; 0 if both are 0 or both are 1."""
        pooled = (self.n_a + self.n_b) / (self.of_a + self.of_b)
        error = standard_error(pooled, self.of_a, self.of_b)
        return abs(self.n_a / self.of_a - self.n_b / self.of_b) / error if error else 0.0

    def __str__(self) -> str:
        return (
            f"{self.view}, {'all rare values' if self.outcome == REST else self.outcome}: shares "
            f"{self.n_a / self.of_a:.4f} and {self.n_b / self.of_b:.4f}, {self.n_errors:.1f} standard errors apart"
        )


def standard_error(p: float, of_a: int, of_b: int) -> float:
    """Return the standard error of the difference between two shares that both have probability `p`."""
    return math.sqrt(p * (1 - p) * (1 / of_a + 1 / of_b))


def detectable(p: float, n: int) -> float:
    """Return the shift of an outcome of probability `p` that `n` draws on each side detect with probability 0.84."""
    return (BOUND + 1) * standard_error(p, n, n)


def tokens_at(draw: Draw, positions: Sequence[int]) -> Outcome:
    return tuple(draw[position] if position < len(draw) else ENDED for position in positions)


def views() -> Iterator[tuple[str, Callable[[Draw], Outcome]]]:
    yield "tokens 1 and 2", partial(tokens_at, positions=(0, 1))
    for position in range(N_POSITIONS):
        yield f"token {position + 1}", partial(tokens_at, positions=(position,))


def cells(a: Sequence[Draw], b: Sequence[Draw]) -> list[Cell]:
    """Return every cell of every view. Within a view each draw is counted in exactly one cell."""
    found = []
    for view, outcome_of in views():
        counts_a, counts_b = Counter(map(outcome_of, a)), Counter(map(outcome_of, b))
        rare = {outcome for outcome, n in (counts_a + counts_b).items() if n < RARE}
        for outcome in sorted((counts_a.keys() | counts_b.keys()) - rare):
            found.append(Cell(view, outcome, counts_a[outcome], len(a), counts_b[outcome], len(b)))
        if rare:
            n_a, n_b = (sum(counts[outcome] for outcome in rare) for counts in (counts_a, counts_b))
            found.append(Cell(view, REST, n_a, len(a), n_b, len(b)))
    return found


def violations(a: Sequence[Draw], b: Sequence[Draw]) -> list[Cell]:
    """Return the cells whose shares differ by more than `BOUND` standard errors, the largest difference first."""
    apart = [cell for cell in cells(a, b) if cell.n_errors > BOUND]
    return sorted(apart, key=lambda cell: -cell.n_errors)
