"""Which width each step verifies, and what became of it.

A step's outcome reaches the host one or two steps after it was decided, in order. `Chooser` remembers what was decided
in between, so that a policy is told which width an outcome belongs to, and how long it took.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from random import Random as Generator
from typing import Protocol

import numpy as np

from sglang_dflash.flags import Flags, WidthPolicy
from sglang_dflash.width import Acceptance, Adaptive, StepCost

logger = logging.getLogger(__name__)

DEFAULT = (1, 2, 4, 6, 8, 12)  # and the whole block


class Policy(Protocol):
    def choose(self, rids: Sequence[str]) -> int:
        """The width of the next step of these requests."""

    def observe(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int], seconds: float | None) -> None:
        """A step's outcome; `seconds` where the time is known to be that step's own."""


class Fixed:
    """Always the same width."""

    def __init__(self, width: int) -> None:
        self.width = width

    def choose(self, rids: Sequence[str]) -> int:
        return self.width

    def observe(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int], seconds: float | None) -> None:
        return


class Random(Fixed):
    """Any width, the same ones on every rank: for tests."""

    def __init__(self, widths: Sequence[int], seed: int = 0) -> None:
        self.widths = widths
        self.generator = Generator(seed)

    def choose(self, rids: Sequence[str]) -> int:
        return self.generator.choice(self.widths)


class Chooser:
    """Invariant: `in_flight` are the decode steps whose outcome `observe` has not been told, oldest first."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.in_flight = deque[tuple[list[str], int]]()
        self.last: tuple[int, int] | None = None  # (requests, width) of the last outcome, None after anything else
        self.last_s = 0.0

    def choose(self, rids: Sequence[str]) -> int:
        width = self.policy.choose(rids)
        self.in_flight.append((list(rids), width))
        return width

    def observe(self, n_accepted_B: Sequence[int], now_s: float) -> None:
        """The oldest step in flight is known, at `now_s`.

        Steps overlap, so the time since the last outcome may be the next step's: it counts where both are alike.
        """
        rids, width = self.in_flight.popleft()
        kind = len(rids), width
        self.policy.observe(rids, width, n_accepted_B, now_s - self.last_s if kind == self.last else None)
        self.last, self.last_s = kind, now_s

    def interrupt(self) -> None:
        """Something else than decoding runs now."""
        self.last = None


def candidates(flags: Flags, block_size: int) -> tuple[int, ...]:
    """The widths to choose from, ascending.

    Raises:
        ValueError: one is not within the block.
    """
    if flags.width_policy is WidthPolicy.FIXED:
        return (block_size,)
    for width in flags.widths:
        if not 1 <= width <= block_size:
            raise ValueError(
                f"SGLANG_DFLASH_WIDTHS: {width} is not within 1..{block_size}, the block that is drafted; drop it"
            )
    return flags.widths or (*(width for width in DEFAULT if width < block_size), block_size)


def make_policy(
    kind: WidthPolicy,
    widths: Sequence[int],
    *,
    n_requests: int,
    seconds: Callable[[int, Sequence[int]], Sequence[float]],
    agree: Callable[[np.ndarray], None],
) -> Policy:
    """
    Args:
        n_requests: that may run at once.
        seconds: what a step of so many requests costs at each of some widths.
        agree: see `StepCost`.
    """
    if kind is WidthPolicy.RANDOM:
        return Random(widths)
    if len(widths) == 1:
        return Fixed(widths[0])
    sizes = [*(2**i for i in range(n_requests.bit_length()) if 2**i < n_requests), n_requests]
    cost = StepCost(widths, {size: seconds(size, widths) for size in sizes}, agree)
    logger.info("seconds per step, requests x width:\n%s", cost)
    return Adaptive(widths, Acceptance(widths[-1] - 1, 2 * n_requests), cost)
