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

    On a GPU the time of a step is the interval between the outcome of the step before and the outcome of this step. If
    the host computes (a CPU), the time is the interval between the launch of this step and the launch of the next step.
    An interval is used only if it contains no prompt and no end of a request:

    - On a GPU, the step before, this step and all steps in flight must have equal numbers of requests. No prefill may
      have been launched between them. The number of steps in flight must be the same at both outcomes.
    - On a CPU, the step before, this step and the next one must have equal numbers of requests. No prefill may have
      been launched between this step and the next one.
    """

    def __init__(self, policy: Policy, trace: Trace | None = None, *, host_computes: bool = False) -> None:
        """`host_computes`: a step has been computed when its launch returns."""
        self.policy, self.trace, self.host_computes = policy, trace, host_computes
        # Steps without an outcome, oldest first; the last field is the requests, see `decide`.
        self.in_flight = deque[tuple[list[str], Decision, Kind, Sequence[Request]]]()
        # At the last outcome: kind of the finished step, number of steps in flight, and time in seconds.
        self.before: tuple[Kind | None, int, float] = None, 0, 0.0
        self.launched = deque[tuple[Kind, float]](maxlen=2)  # kinds and clock times of the last two launches
        self.tally, self.recent = Tally(), Tally()  # since the start, and since the last log line
        self.n_interruptions, self.expected_tokens = 0, 0.0  # since the start
        self.is_suspected = False  # whether the warning about the draft was logged

    def decide(self, rids: list[str], requests: Sequence[Request] = (), *, now_s: float = 0.0) -> int:
        """Return the width of the next step of these requests.

        Args:
            rids: ids of the requests.
            requests: the requests. Those that end or are retracted before the outcome are left out of the tallies and
                of `expected_tokens`. Empty: all are counted.
            now_s: clock time in seconds; only used if the host computes.
        """
        if self.host_computes and self.launched:
            kind, launched_s = self.launched[-1]
            are_as_many = all(other.n_requests == len(rids) for other, _ in self.launched)
            if are_as_many and kind.n_interruptions == self.n_interruptions:
                self._time(kind, now_s - launched_s)
        decision = self.policy.decide(rids)
        kind = Kind(len(rids), decision.width, self.n_interruptions)
        self.in_flight.append((rids, decision, kind, requests))
        self.launched.append((kind, now_s))
        return decision.width

    def _time(self, kind: Kind, seconds: float) -> None:
        if self.policy.cost:
            self.policy.cost.observe(kind.n_requests, kind.width, seconds)

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
        if not self.host_computes and self._is_timed(kind, before, n_in_flight):
            self._time(kind, now_s - before_s)
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
        """Return whether the interval between two outcomes is the time of a step of kind `kind`, on a GPU."""
        if before is None or n_in_flight != len(self.in_flight):
            return False
        return all(other._replace(width=kind.width) == kind for other in (before, *(one[2] for one in self.in_flight)))

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
