"""Choice of each step's width, and counts of the outcomes of steps."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang_dflash.engine.width.cost import Agree, StepCost, table
from sglang_dflash.engine.width.policy import Adaptive, Decision, Fixed, Policy, Random
from sglang_dflash.engine.width.tally import Request, Tally, is_counted
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import Flags, WidthPolicy

logger = logging.getLogger(__name__)

REPORT = 1000  # number of steps between two log lines
# A warning is logged after at least this many drafted blocks, if less than this share of them has an accepted draft.
SUSPECT_BLOCKS, SUSPECT_SHARE = 500, 0.02
DEFAULT = (1, 4, 8, 12)  # default verify widths: those below the block size, and the whole block
WIDEST = 32  # largest width in SGLANG_DFLASH_WIDTHS if the block is smaller; n-gram copies fill the rest

Measure = Callable[[int, Sequence[int]], Sequence[float]]  # (number of requests, widths) -> seconds of a step at each
Trace = Callable[[Sequence[str], int, Sequence[int], float], None]  # ids, width, accepted drafts, clock time in s


class Kind(NamedTuple):
    """Properties of a step on which its time depends."""

    n_requests: int
    width: int
    n_interruptions: int  # before the step


class Chooser:
    """Chooser of each step's width by a policy, which receives outcomes in the order of steps, one or two steps late.

    The time of a step is measured as the interval between two consecutive outcomes. On a GPU this interval is the time
    of the step that just finished, on a CPU that of a step launched later. So an interval is used only if all steps
    involved are equal: the finished step, the one before it, and all steps in flight. These steps must have equal
    numbers of requests and equal widths, without a prefill in between. The number of steps in flight must also be equal
    at both outcomes. If it is 0, the interval is that of the finished step, so the step before may have another width.
    """

    def __init__(self, policy: Policy, trace: Trace | None = None) -> None:
        self.policy, self.trace = policy, trace
        # Steps without an outcome, oldest first; the last field is the requests, see `decide`.
        self.in_flight = deque[tuple[list[str], Decision, Kind, Sequence[Request]]]()
        # At the last outcome: kind of the finished step, number of steps in flight, and time in seconds.
        self.before: tuple[Kind | None, int, float] = None, 0, 0.0
        self.tally, self.recent = Tally(), Tally()  # since the start, and since the last log line
        self.n_interruptions, self.expected_tokens = 0, 0.0  # since the start
        self.n_steady = 0  # number of last steps of as many requests as the latest, without a prompt since
        self.is_suspected = False  # whether the warning about the draft was logged

    def decide(self, rids: list[str], requests: Sequence[Request] = ()) -> int:
        """Return the width of the next step of these requests.

        Args:
            rids: ids of the requests.
            requests: the requests; those that end before the outcome are left out of all counts. Empty: none ends.
        """
        before = self.in_flight[-1][2] if self.in_flight else self.before[0]
        is_steady = before is not None and before[::2] == (len(rids), self.n_interruptions)
        self.n_steady = self.n_steady + 1 if is_steady else 0
        decision = self.policy.decide(rids, self.n_steady)
        self.in_flight.append((rids, decision, Kind(len(rids), decision.width, self.n_interruptions), requests))
        return decision.width

    def interrupt(self) -> None:
        """Record that a prefill was launched, so that step times around it are not used."""
        self.n_interruptions += 1

    def observe(self, n_accepted_B: Sequence[int], now_s: float) -> None:
        """Record the outcome of the oldest step in flight; `now_s`: clock time in seconds."""
        rids, decision, kind, requests = self.in_flight.popleft()
        n_requests, width, _ = kind
        assert n_requests == len(n_accepted_B), "an outcome of another step than the oldest"
        self.policy.observe(rids, decision, n_accepted_B)
        before, n_in_flight, before_s = self.before
        if self.policy.cost and self._is_timed(kind, before, n_in_flight):
            self.policy.cost.observe(n_requests, width, now_s - before_s)
        self.before = kind, len(self.in_flight), now_s
        counted = [is_counted(request) for request in requests] or [True] * n_requests
        self.expected_tokens += sum(counted) * decision.expected
        for tally in (self.tally, self.recent):
            tally.add(width, [n for n, counts in zip(n_accepted_B, counted, strict=True) if counts])
        self._warn_of_draft()
        if self.trace:
            self.trace(rids, width, n_accepted_B, now_s)
        if self.recent.n_steps.total() == REPORT:
            logger.info("%s", self.recent)
            self.recent = Tally()

    def _is_timed(self, kind: Kind, before: Kind | None, n_in_flight: int) -> bool:
        """Return whether the interval between two outcomes is the time of a step of kind `kind`."""
        if before is None or n_in_flight != len(self.in_flight):
            return False
        if not n_in_flight:
            return before._replace(width=kind.width) == kind
        return before == kind and all(other == kind for _, _, other, _ in self.in_flight)

    def _warn_of_draft(self) -> None:
        """Warn once if hardly any block has an accepted draft. The draft may belong to another target."""
        n_drafted, n_useful = self.tally.n_drafted, self.tally.n_useful
        if not self.is_suspected and n_drafted >= SUSPECT_BLOCKS and n_useful < SUSPECT_SHARE * n_drafted:
            self.is_suspected = True
            logger.warning(
                "only %d of %d drafted blocks had an accepted draft: perhaps the draft was trained for another target "
                "or other text, or its slots are shifted by one; run `sglang-dflash check --draft-steps 20` with the "
                "launch flags",
                n_useful,
                n_drafted,
            )

    def describe(self) -> dict[str, Any]:
        """Return counts since the start and the estimated step times, in types that JSON has."""
        return {
            "policy": self.policy.name,
            "seconds": self.policy.cost.by_size() if self.policy.cost else {},
            "n_steps": {str(width): n for width, n in sorted(self.tally.n_steps.items())},
            "n_blocks": self.tally.n_blocks.total(),
            "committed": self.tally.n_committed(),
            "acceptance_length": self.tally.acceptance_length(),
            "expected": self.expected_tokens,
            "account": str(self.tally) if self.tally.n_steps else "",
        }


def candidates(flags: Flags, block_size: int, no_copies: str, whole_blocks: str = "") -> tuple[int, ...]:
    """Return the widths to choose from, ascending.

    Args:
        flags: environment flags.
        block_size: number of tokens per block.
        no_copies: reason why blocks get no n-gram copies; "": there are copies, so widths may exceed the block.
        whole_blocks: reason why only the whole block can be verified; "": any width can be verified.
    Raises:
        ValueError: a width is out of range.
        NotSupported: a width exceeds the block although there are no copies, or differs from the block although only
            the block can be verified.
    """
    if flags.width_policy is WidthPolicy.FIXED or (whole_blocks and flags.widths in ((), (block_size,))):
        return (block_size,)
    if whole_blocks:
        raise NotSupported(
            f"SGLANG_DFLASH_WIDTHS={','.join(map(str, flags.widths))}: this server verifies only whole blocks "
            f"({whole_blocks}); set the variable to {block_size}, or unset it"
        )
    most = block_size if no_copies else max(block_size, WIDEST)
    for width in flags.widths:
        if width > block_size and no_copies:
            raise NotSupported(
                f"SGLANG_DFLASH_WIDTHS: {width} exceeds the block of {block_size} (only n-gram copies extend a block, "
                f"and they are off: {no_copies}); remove {width}, or unset the variable"
            )
        if not 1 <= width <= most:
            raise ValueError(
                f"SGLANG_DFLASH_WIDTHS: {width} is not within 1..{most}; remove {width}, or unset the variable"
            )
    return flags.widths or (*(width for width in DEFAULT if width < block_size), block_size)


def widest(block_size: int, widths: Sequence[int]) -> int:
    """Return the largest number of tokens per request whose K/V a step writes. Memory sizes depend on it."""
    return max((block_size, *widths))


def make_policy(kind: WidthPolicy, widths: Sequence[int], *, n_requests: int, seconds: Measure, agree: Agree) -> Policy:
    """Return the policy of a server.

    Args:
        kind: RANDOM gives `Random`. Any other kind gives `Adaptive`, or `Fixed` if there is one width.
        widths: widths to choose from, ascending; empty on a prefill-only server.
        n_requests: largest number of requests in a batch.
        seconds: function that measures step times.
        agree: function that overwrites an array with the same values on every rank.
    """
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
