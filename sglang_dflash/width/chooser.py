"""Which width each step verifies, and what became of it."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import Flags, WidthPolicy
from sglang_dflash.width.cost import Agree, StepCost, table
from sglang_dflash.width.policy import Adaptive, Decision, Fixed, Policy, Random
from sglang_dflash.width.tally import Tally

logger = logging.getLogger(__name__)

REPORT = 1000  # steps between two lines in the log
DEFAULT = (1, 4, 8, 12)  # and the whole block
WIDEST = 32  # of what copies may continue behind a block

Measure = Callable[[int, Sequence[int]], Sequence[float]]  # seconds of a step of so many requests, at each width
Trace = Callable[[Sequence[str], int, Sequence[int], float], None]  # of a step: requests, width, accepted, when
Kind = tuple[int, int, int]  # of a step: requests, width, how often something else was launched before it


class Chooser:
    """Asks a policy, and tells it of outcomes, which reach the host in order, one or two steps late.

    The time between two outcomes is a step's: on a device that of the step whose outcome came, on a host that computes
    of one launched since. So it is taken where they are alike: the step, the one before it and those in flight have as
    many requests, the same width, no prompt in between; and where as many are in flight as at the outcome before.
    """

    def __init__(self, policy: Policy, trace: Trace | None = None) -> None:
        self.policy, self.trace = policy, trace
        self.in_flight = deque[tuple[list[str], Decision, Kind]]()  # no outcome yet, oldest first
        self.before: tuple[Kind | None, int, float] = None, 0, 0.0  # the last outcome: its step, in flight then, when
        self.tally, self.recent = Tally(), Tally()  # since the start, since the last line in the log
        self.epoch, self.expected = 0, 0.0  # the latter tokens, since the start

    def decide(self, rids: list[str]) -> int:
        """The width of the next step of these requests."""
        decision = self.policy.decide(rids)
        self.in_flight.append((rids, decision, (len(rids), decision.width, self.epoch)))
        return decision.width

    def interrupt(self) -> None:
        """Something else than decoding is launched now."""
        self.epoch += 1

    def observe(self, n_accepted_B: Sequence[int], now_s: float) -> None:
        """The outcome of the oldest step in flight has come."""
        rids, decision, kind = self.in_flight.popleft()
        n_requests, width, _ = kind
        assert n_requests == len(n_accepted_B), "an outcome of another step than the oldest"
        self.policy.observe(rids, decision, n_accepted_B)
        *before, before_s = self.before
        steady = before == [kind, len(self.in_flight)] and all(other == kind for *_, other in self.in_flight)
        if self.policy.cost and steady:
            self.policy.cost.observe(n_requests, width, now_s - before_s)
        self.before = kind, len(self.in_flight), now_s
        self.expected += n_requests * decision.expected
        for tally in (self.tally, self.recent):
            tally.add(width, n_accepted_B)
        if self.trace:
            self.trace(rids, width, n_accepted_B, now_s)
        if self.recent.n_steps.total() == REPORT:
            logger.info("%s", self.recent)
            self.recent = Tally()

    def describe(self) -> dict[str, Any]:
        """Counts since the start, and what steps take as far as known, as JSON has it."""
        return {
            "policy": self.policy.name,
            "seconds": self.policy.cost.by_size() if self.policy.cost else {},
            "n_steps": {str(width): n for width, n in sorted(self.tally.n_steps.items())},
            "committed": self.tally.n_committed(),
            "expected": self.expected,
            "account": str(self.tally) if self.tally.n_steps else "",
        }


def candidates(flags: Flags, block_size: int, no_copies: str, whole_blocks: str = "") -> tuple[int, ...]:
    """The widths to choose from, ascending.

    Args:
        no_copies: why copies do not continue a block, if it is so; then nothing more than it is verified.
        whole_blocks: why nothing but the block is verified, if it is so.
    Raises:
        ValueError: one is none that can be verified.
        NotSupported: one is narrower or wider than the block, and there is a reason against it.
    """
    if flags.width_policy is WidthPolicy.FIXED or (whole_blocks and flags.widths in ((), (block_size,))):
        return (block_size,)
    for width in flags.widths:
        if not 1 <= width <= max(block_size, WIDEST):
            raise ValueError(f"SGLANG_DFLASH_WIDTHS: {width} is not within 1..{max(block_size, WIDEST)}; drop it")
        if width > block_size and no_copies:
            raise NotSupported(
                f"SGLANG_DFLASH_WIDTHS: {width} is wider than the block of {block_size}, behind which there are "
                f"only copies, and nothing is copied ({no_copies}); drop it"
            )
    if whole_blocks:
        raise NotSupported(
            f"SGLANG_DFLASH_WIDTHS: whole blocks are verified ({whole_blocks}); set it to {block_size}, or drop it"
        )
    return flags.widths or (*(width for width in DEFAULT if width < block_size), block_size)


def widest(block_size: int, widths: Sequence[int]) -> int:
    """Tokens of a request that a step writes at most, and memory is made for."""
    return max((block_size, *widths))


def make_policy(kind: WidthPolicy, widths: Sequence[int], *, n_requests: int, seconds: Measure, agree: Agree) -> Policy:
    """`n_requests` may run at once."""
    if not widths:
        return Fixed(1, name="prompts only")
    if kind is WidthPolicy.RANDOM:
        return Random(widths)
    if len(widths) == 1:
        return Fixed(widths[0])
    sizes = [*(2**i for i in range(n_requests.bit_length()) if 2**i < n_requests), n_requests]
    cost = StepCost(widths, {size: seconds(size, widths) for size in sizes}, agree)
    logger.info("seconds per step, requests x width:\n%s", table(cost.by_size()))
    return Adaptive(widths, cost)
