"""Step times for a replay: milliseconds for a number of requests, of verified rows, and of drafted blocks."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tests.tools.tables.step_cost import (
    BYTES_PER_MS,
    CONTEXT_KV_BYTES,
    DRAFT_BYTES,
    FOLD_MS,
    HEAD_BYTES,
    OUTSIDE_MS,
    TARGET_BYTES,
    VOCABULARY,
    N,
    product,
)

Size = tuple[int, int, int]  # number of requests, of verified rows, and of drafted blocks


class Machine(NamedTuple):
    """Times of a machine.

    Attributes:
        widths: default verify widths.
        finer: rival of verify widths per request.
        is_late: whether outcomes arrive a step late (SGLang's overlap schedule).
        off: milliseconds of a step without speculation, by number of requests.
        step: milliseconds of a step of any size.
    """

    name: str
    widths: tuple[int, ...]
    finer: tuple[int, ...]
    is_late: bool
    off: Callable[[int], float]
    step: Callable[[Size], float]

    def uniform(self, n_requests: int, width: int) -> float:
        """Return the milliseconds of a step that verifies equally many tokens of every request."""
        return self.step((n_requests, n_requests * width, n_requests if width > 1 else 0))


# SmolLM2 on one thread of a CPU (C), medians: at widths 1, 4 and 8, and without speculation.
CPU = {1: (32.7, 45.0, 52.6), 8: (46.0, 104.3, 158.4)}
CPU_WIDTHS, CPU_OFF = (1, 4, 8), {1: 32.0, 8: 45.2}
# A 27B target with blocks of 16 on an H200 (G): at widths 1, 4, 8, 12 and 16, and without speculation.
H200 = {
    1: (14.76, 17.59, 17.79, 18.16, 18.28),
    2: (14.93, 18.01, 18.2, 18.89, 18.85),
    4: (15.26, 18.79, 19.3, 20.25, 20.73),
    8: (15.91, 20.15, 21.24, 22.68, 23.39),
}
# The verify of recurrent states in these steps, by number of blocks of 16 tokens.
VERIFY_MS = {1: 0.57, 8: 1.35, 32: 4.04}
H200_WIDTHS, H200_OFF = (1, 4, 8, 12, 16), {1: 14.58, 8: 15.71}


def fitted(
    base: Callable[[Size], float], measured: Mapping[int, Sequence[float]], widths: Sequence[int]
) -> Callable[[Size], float]:
    """Return `base` plus the terms of a step, a request, a row and a drafted block that fit the measured times best."""
    sizes = [(B, B * width, B if width > 1 else 0) for B in measured for width in widths]
    terms = np.array([(1, B, n_rows, n_drafted, n_drafted > 0) for B, n_rows, n_drafted in sizes], dtype=float)
    rest = [ms - base(size) for size, ms in zip(sizes, (ms for row in measured.values() for ms in row), strict=True)]
    factors = np.linalg.lstsq(terms, np.array(rest), rcond=None)[0].tolist()

    def step(size: Size) -> float:
        B, n_rows, n_drafted = size
        return base(size) + float(np.dot(factors, (1, B, n_rows, n_drafted, n_drafted > 0)))

    return step


def h200(size: Size) -> float:
    """Return the computed milliseconds of a step (P), as `tests.tools.tables.step_cost` computes them."""
    _, n_rows, n_drafted = size

    def by_rows(ms: Mapping[int, float]) -> float:
        return float(np.interp(n_rows, [N * size for size in ms], list(ms.values()))) * max(1, n_rows / (N * max(ms)))

    verify = product(TARGET_BYTES, n_rows) + 12 * n_rows * VOCABULARY / BYTES_PER_MS + by_rows(VERIFY_MS)
    verify += by_rows(FOLD_MS) + product(CONTEXT_KV_BYTES, n_rows) + OUTSIDE_MS
    n_heads = n_drafted * (N - 1)
    head = product(HEAD_BYTES, n_heads) + 2 * n_heads * VOCABULARY / BYTES_PER_MS
    return verify + (product(DRAFT_BYTES, N * n_drafted) + head if n_drafted else 0)


def interpolated(ms: Mapping[int, float]) -> Callable[[int], float]:
    """Return a function that interpolates times by number of requests; beyond the last, requests add as much."""
    (first, low), (last, high) = ms.items()
    return lambda n_requests: low + (high - low) * (n_requests - first) / (last - first)


MACHINES = (
    Machine(
        "CPU, SmolLM2",
        CPU_WIDTHS,
        (1, 2, 4, 6, 8),
        False,
        interpolated(CPU_OFF),
        fitted(lambda size: 0.0, CPU, CPU_WIDTHS),
    ),
    Machine(
        "H200, 27B", H200_WIDTHS, (1, 4, 6, 8, 12, 16), True, interpolated(H200_OFF), fitted(h200, H200, H200_WIDTHS)
    ),
)
