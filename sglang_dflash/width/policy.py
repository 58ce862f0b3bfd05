"""Policies for the verify width: the number of tokens of a block that the target verifies.

Verifying w tokens commits, on average over the requests of a batch, E(w) = S_0 + ... + S_(w-1) tokens. S_i is the
probability that drafts 1..i are all accepted (S_0 = 1 is the bonus), and the step takes T(B, w) seconds. At width 1
nothing is drafted. Drafts fail in clusters: right after a rejection the next one fails more often than some tokens
later. So besides a width w the policy chooses a rest, r steps of one token before each draft, and takes

    max over r and w of  (r + E_r(w)) / (r T(B, 1) + T(B, w))

over all widths. On a GPU T is a staircase, so a worse neighbour does not exclude a better width beyond it.

Verifying w tokens shows the outcome at every narrower width, but not at wider ones. So some steps verify the whole
block, which is called a look: the first step of a request that runs alone, the first of a batch of new requests, and
later steps once a budget covers the expected loss. The budget grows by `EXPLORE` times the most that a wider block
could gain if all unseen drafts were accepted. Switching is free; the only hysteresis is slow forgetting.

The policy runs on the host in plain Python, from counts that arrive one or two steps late. numpy calls between two
steps would be slow on a CPU whose caches a model has just filled. Ranks with the same counts choose the same width.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from sglang_dflash.width.acceptance import Acceptance
from sglang_dflash.width.cost import StepCost

EXPLORE = 0.01  # budget for looks, as a fraction of a wider block's possible gain, and at most of the time
REST = 6  # steps of one token between two drafts, if drafts rest; longer rests have no further effect
REST_DECAY = math.exp(-1 / 128)  # per draft: how fast evidence about rest periods fades
REST_PRIOR = 64.0  # weight of a factor of 1, in accepted drafts
SETTLE = 32  # steps between two settlements of measured step times
EARLY = (SETTLE // 4, SETTLE // 2)  # steps that settle in addition: times measured at start-up may be wrong


class Decision(NamedTuple):
    """Decision about one step."""

    width: int
    expected: float = 0.0  # committed tokens per request; 0: the policy does not estimate them
    rested: bool = False  # drafts after `REST` steps of one token


class Policy(ABC):
    """Policy that chooses widths, the same on every rank."""

    name: str
    cost: StepCost | None = None  # None: the policy does not use costs

    @abstractmethod
    def decide(self, rids: Sequence[str]) -> Decision:
        """Decide the next step of these requests."""

    def observe(self, rids: Sequence[str], decision: Decision, n_accepted_B: Sequence[int]) -> None:
        """Record the outcome of a decided step."""
        return


class Fixed(Policy):
    """Policy with one width."""

    def __init__(self, width: int, name: str = "") -> None:
        self.decision, self.name = Decision(width), name or f"always {width}"

    def decide(self, rids: Sequence[str]) -> Decision:
        return self.decision


class Random(Policy):
    """Policy that draws a width at each step. For tests."""

    name = "random"

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths, self.random = widths, random.Random(0)

    def decide(self, rids: Sequence[str]) -> Decision:
        """Draw a width, the same on every rank."""
        return Decision(self.random.choice(self.widths))


class Rhythm:
    """Two factors on the expected number of accepted drafts: right after another draft, and after a rest.

    A factor is the ratio of accepted to expected drafts (see `Acceptance`) in its case, relative to the ratio over all
    drafts, and shrunk to 1.
    """

    def __init__(self) -> None:
        self.accepted_2, self.expected_2 = [0.0, 0.0], [0.0, 0.0]

    def factors(self) -> list[float]:
        """Return the factor right after a draft, and the one after a rest."""
        level = (sum(self.accepted_2) + 1) / (sum(self.expected_2) + 1)
        return [(self.accepted_2[i] / level + REST_PRIOR) / (self.expected_2[i] + REST_PRIOR) for i in (0, 1)]

    def observe(self, rested: bool, accepted: float, expected: float) -> None:
        """Record accepted and expected drafts of a step, means over its requests; `expected` includes the factor."""
        expected /= self.factors()[rested]
        self.accepted_2 = [REST_DECAY * before + accepted * (i == rested) for i, before in enumerate(self.accepted_2)]
        self.expected_2 = [REST_DECAY * before + expected * (i == rested) for i, before in enumerate(self.expected_2)]


class Review(NamedTuple):
    """Best decision for a batch at the current estimates, and the value of a look."""

    rest: int  # steps of one token before each draft
    best: Decision
    look: Decision
    block_s: float  # seconds of a step that verifies the whole block
    price_s: float  # expected loss of a look, in seconds
    saving_s: float  # seconds added to the budget for looks at each step


class Adaptive(Policy):
    """Policy that maximises committed tokens per second over width and rest."""

    cost: StepCost

    def __init__(self, widths: Sequence[int], cost: StepCost) -> None:
        """`widths` ascending, the last one the block."""
        self.name, self.widths, self.cost = "auto", tuple(widths), cost
        self.cycles = [(rest, width) for width in widths for rest in (0, REST) if rest == 0 or widths[0] == 1 < width]
        self.acceptance, self.rhythm = Acceptance(widths[-1] - 1), Rhythm()
        self.review: Review | None = None  # for the requests `reviewed`; None: outdated by new outcomes
        self.reviewed: Sequence[str] = ()
        self.n_steps, self.n_rested, self.saved_s = 0, 0, 0.0  # rested: since the last draft; saved: for looks
        self.drafted = set[str]()  # requests for which a draft was decided

    def decide(self, rids: Sequence[str]) -> Decision:
        """Choose the best width, a step of a rest, or a look if the budget covers its price."""
        self.n_steps += 1
        if self.n_steps % SETTLE == 0 or self.n_steps in EARLY:
            self.cost.settle()
            self.review = None
        if self.review is None or rids != self.reviewed:
            self.review, self.reviewed = self._review(rids), rids
        review = self.review
        self.saved_s = min(self.saved_s + review.saving_s, review.block_s)
        decision = review.best if self.n_rested >= review.rest else Decision(1, expected=1.0)
        # If drafts rest, a look is a draft without a rest.
        may_look = self.saved_s >= review.price_s and (review.best.width == 1 or self.n_rested == 0)
        if may_look or (self.drafted.isdisjoint(rids) and (len(rids) == 1 or self.saved_s >= 0)):
            self.saved_s -= review.price_s
            if len(rids) == 1:  # the budget of a batch may become negative, so that changing batches rarely look
                self.saved_s = max(self.saved_s, 0.0)
            decision = review.look
        if decision.width > 1:
            self.drafted.update(rids)
            if len(self.drafted) > 4 * len(rids) + 64:  # most have ended
                self.drafted.intersection_update(rids)
        rested = self.n_rested >= REST
        self.n_rested = self.n_rested + 1 if decision.width == 1 else 0
        return decision._replace(rested=rested)

    def _review(self, rids: Sequence[str]) -> Review:
        committed_N, block = self.acceptance.expected(rids), self.widths[-1]
        seconds = dict(zip(self.widths, self.cost.of(len(rids)), strict=True))
        factors = dict(zip((0, REST), self.rhythm.factors(), strict=True))
        expected = {
            (rest, width): 1 + min(factor * (committed_N[width] - 1), width - 1)
            for rest, factor in factors.items()
            for width in self.widths
        }
        # Ties go to the shortest rest, then to the greatest width, which gives the most information.
        rate, minus_rest, width = max(
            ((rest + expected[rest, width]) / (rest * seconds[self.widths[0]] + seconds[width]), -rest, width)
            for rest, width in self.cycles
        )
        rest, look = -minus_rest, Decision(block, expected[REST if width == 1 else 0, block])
        usual = 1 if rest else width
        # Upper bound: gain per extra slot if every further draft were accepted.
        gain = committed_N[usual] - committed_N[usual - 1]
        hoped = max((expected[0, usual] + gain * (w - usual)) / seconds[w] for w in self.widths if w >= usual)
        return Review(
            rest,
            best=Decision(width, expected[rest, width]),
            look=look,
            block_s=seconds[block],
            price_s=seconds[block] - look.expected / rate,  # beyond the time of as many tokens at the best rate
            saving_s=EXPLORE * min(max(hoped / rate - 1, 0), 1) * seconds[usual],
        )

    def observe(self, rids: Sequence[str], decision: Decision, n_accepted_B: Sequence[int]) -> None:
        """Record the accepted drafts, for acceptance and for the effect of rests."""
        self.acceptance.observe(rids, decision.width, n_accepted_B)
        if decision.width > 1:
            self.rhythm.observe(decision.rested, sum(n_accepted_B) / len(n_accepted_B), decision.expected - 1)
            self.review = None
