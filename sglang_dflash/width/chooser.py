"""Which width each step verifies, and what became of it.

A step's outcome reaches the host one or two steps after it was decided, in order. `Chooser` remembers what was decided
in between, so that a policy is told which width an outcome belongs to; `step_clock.py` tells it how long steps took.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random as Generator
from typing import Any, Protocol

import numpy as np

from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import Flags, WidthPolicy
from sglang_dflash.width.clock import Step, StepClock, Tell
from sglang_dflash.width.cost import StepCost, table
from sglang_dflash.width.policy import Acceptance, Adaptive, Decision

logger = logging.getLogger(__name__)

REPORT = 1000  # steps between two lines in the log
DEFAULT = (1, 2, 4, 6, 8, 12)  # and the whole block


class Policy(Protocol):
    name: str  # as in SGLANG_DFLASH_WIDTHS

    def seconds(self) -> dict[str, dict[str, float]]:
        """What a step is believed to take, by requests, then by width; empty where nobody asks."""

    def decide(self, rids: Sequence[str]) -> Decision:
        """For the next step of these requests."""

    def observe(self, rids: Sequence[str], decision: Decision, n_accepted_B: Sequence[int]) -> None:
        """A step's outcome."""

    def time(self, n_requests: int, width: int, seconds: float) -> None:
        """What a step took, where that is known. Only steps whose time was expected are timed."""


class Fixed:
    """Always the same width."""

    def __init__(self, width: int) -> None:
        self.name = f"always {width}"
        self.decision = Decision(width)

    def seconds(self) -> dict[str, dict[str, float]]:
        return {}

    def decide(self, rids: Sequence[str]) -> Decision:
        return self.decision

    def observe(self, rids: Sequence[str], decision: Decision, n_accepted_B: Sequence[int]) -> None:
        return

    def time(self, n_requests: int, width: int, seconds: float) -> None:
        return


class Random:
    """Any width, the same ones on every rank: for tests."""

    name = "random"

    def __init__(self, widths: Sequence[int], seed: int = 0) -> None:
        self.widths = widths
        self.generator = Generator(seed)

    def seconds(self) -> dict[str, dict[str, float]]:
        return {}

    def decide(self, rids: Sequence[str]) -> Decision:
        return Decision(self.generator.choice(self.widths))

    def observe(self, rids: Sequence[str], decision: Decision, n_accepted_B: Sequence[int]) -> None:
        return

    def time(self, n_requests: int, width: int, seconds: float) -> None:
        return


class Account:
    """What the chosen widths came to, beside always the same width.

    What a narrower width would have committed follows from what was accepted; what a wider one would have, and how long
    any would have taken, is what was expected when the step was decided.
    """

    def __init__(self) -> None:
        self.n_steps = Counter[int]()  # by width
        self.n_rows = 0  # requests, summed over the steps
        self.committed = self.expected = self.seconds = 0.0
        self.committed_always = defaultdict[int, float](float)  # by width
        self.seconds_always = defaultdict[int, float](float)

    def add(self, decision: Decision, n_accepted_B: Sequence[int]) -> None:
        width, n_rows = decision.width, len(n_accepted_B)
        committed = n_rows + sum(n_accepted_B)
        self.n_steps[width] += 1
        self.n_rows += n_rows
        self.committed += committed
        if not decision.committed:
            return
        self.expected += n_rows * decision.committed[width]
        self.seconds += decision.seconds[width]
        for other, seconds in decision.seconds.items():
            self.seconds_always[other] += seconds
            self.committed_always[other] += (
                sum(min(n, other - 1) for n in n_accepted_B) + n_rows
                if other <= width
                else committed + n_rows * (decision.committed[other] - decision.committed[width])
            )

    def join(self, later: Account) -> None:
        """Steps of another account as well."""
        self.n_steps.update(later.n_steps)
        self.n_rows += later.n_rows
        self.committed += later.committed
        self.expected += later.expected
        self.seconds += later.seconds
        for mine, theirs in (
            (self.committed_always, later.committed_always),
            (self.seconds_always, later.seconds_always),
        ):
            for width, value in theirs.items():
                mine[width] += value

    @property
    def best(self) -> int | None:
        """The width that would have committed most per second; None where nothing was expected."""
        rate = {width: self.committed_always[width] / seconds for width, seconds in self.seconds_always.items()}
        return max(rate, key=lambda width: rate[width], default=None)

    @property
    def regret(self) -> float:
        """The share of the best width's tokens per second that was missed; negative where choosing was better."""
        if self.best is None:
            return 0.0
        return 1 - self.committed / self.seconds * self.seconds_always[self.best] / self.committed_always[self.best]

    def __str__(self) -> str:
        n_steps = sum(self.n_steps.values())
        shares = ", ".join(f"{width} in {n / n_steps:.0%}" for width, n in sorted(self.n_steps.items()))
        text = f"widths of {n_steps} steps: {shares}; {self.committed / self.n_rows:.2f} tokens per request and step"
        if self.best is None:
            return text
        return (
            f"{text} ({self.expected / self.n_rows:.2f} expected); "
            f"{abs(self.regret):.1%} {'below' if self.regret > 0 else 'above'} always {self.best}"
        )


class Trace:
    """Every step's outcome, a line of JSON each, in a file of this process's own: ranks do not share one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)

    def add(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int], now_s: float) -> None:
        line = {"s": round(now_s, 6), "width": width, "accepted": dict(zip(rids, n_accepted_B, strict=True))}
        self.file.write(json.dumps(line) + "\n")


class Chooser:
    """Invariant: `in_flight` are the decode steps whose outcome `observe` has not been told, oldest first."""

    def __init__(self, policy: Policy, clock: Callable[[Tell], StepClock], trace: Trace | None = None) -> None:
        """`clock`: the class that fits the device."""
        self.policy = policy
        self.clock = clock(policy.time)
        self.trace = trace
        self.in_flight = deque[tuple[list[str], Decision, int]]()  # the last: its epoch
        self.epoch = 0
        self.account = Account()  # since the last line in the log
        self.before = Account()  # what came before that

    def choose(self, rids: list[str], now_s: float) -> int:
        """The width of the next step of these requests."""
        decision = self.policy.decide(rids)
        self.in_flight.append((rids, decision, self.epoch))
        if decision.seconds:
            self.clock.decided(timed(rids, decision, self.epoch), now_s)
        return decision.width

    def observe(self, n_accepted_B: Sequence[int], now_s: float) -> None:
        """The oldest step in flight is known, at `now_s`."""
        rids, decision, epoch = self.in_flight.popleft()
        assert len(rids) == len(n_accepted_B), "an outcome of another step than the oldest"
        self.policy.observe(rids, decision, n_accepted_B)
        if decision.seconds:
            self.clock.known(timed(rids, decision, epoch), now_s)
        self.account.add(decision, n_accepted_B)
        if self.trace is not None:
            self.trace.add(rids, decision.width, n_accepted_B, now_s)
        if sum(self.account.n_steps.values()) == REPORT:
            logger.info("%s", self.account)
            self.before.join(self.account)
            self.account = Account()

    def describe(self) -> dict[str, Any]:
        """What was chosen since the start, as JSON has it; seconds as they are believed now."""
        account = Account()
        account.join(self.before)
        account.join(self.account)
        return {
            "policy": self.policy.name,
            "seconds": self.policy.seconds(),
            "n_steps": {str(width): n for width, n in sorted(account.n_steps.items())},
            "committed": account.committed,
            "expected": account.expected,
            "regret": account.regret,
            "account": str(account) if account.n_steps else "",
        }

    def interrupt(self) -> None:
        """Something else than decoding is launched now."""
        self.epoch += 1
        self.clock.interrupt()


def timed(rids: Sequence[str], decision: Decision, epoch: int) -> Step:
    """The step, for the clock."""
    return Step(len(rids), decision.width, epoch, decision.seconds[decision.width])


def candidates(flags: Flags, block_size: int, *, may_narrow: bool = True) -> tuple[int, ...]:
    """The widths to choose from, ascending.

    Args:
        may_narrow: whether the target can verify less than the block.
    Raises:
        ValueError: one is not within the block.
        NotSupported: one is narrower than the block, and the target cannot do that.
    """
    if flags.width_policy is WidthPolicy.FIXED:
        return (block_size,)
    if not may_narrow and flags.widths in ((), (block_size,)):
        return (block_size,)
    for width in flags.widths:
        if not 1 <= width <= block_size:
            raise ValueError(
                f"SGLANG_DFLASH_WIDTHS: {width} is not within 1..{block_size}, the block that is drafted; drop it"
            )
    if not may_narrow:
        raise NotSupported(
            f"SGLANG_DFLASH_WIDTHS: SGLang verifies whole blocks of this target (its recurrent layers find a token's "
            f"state by the size of the block); set it to {block_size}, or drop it"
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
    logger.info("seconds per step, requests x width:\n%s", table(cost.by_size()))
    return Adaptive(widths, Acceptance(widths[-1] - 1, 2 * n_requests), cost)
