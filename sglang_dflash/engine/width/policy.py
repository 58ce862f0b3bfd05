"""Policies for the verify width: the number of tokens of a block that the target verifies.

A step with B requests at width w takes T(B, w) seconds. For each request it commits E(w) = S_0 + ... + S_(w-1) tokens
on average. S_i is the probability that drafts 1..i are all accepted, and S_0 = 1 stands for the bonus. At width 1
nothing is drafted. Drafts fail in clusters: a block drafted right after a rejection fails more often than one drafted
some tokens later. So the policy chooses a width w and a rest r, the number of steps of one token before each drafted
block. E_r(w) is E(w) after such a rest. The policy uses the r and w with the

    maximum of  (r + E_r(w)) / (r T(B, 1) + T(B, w))

over r = 0 and r = REST and all widths. On a GPU T grows in jumps, so the optimum may lie beyond a worse width.

A step at width w shows which drafts at narrower widths would be accepted, but nothing about further drafts. So some
steps, called looks, verify at the largest width, or in large batches at a narrower one. A request that runs alone and
has had no drafts gets a look. A batch of several requests that have all had no drafts gets a look if the budget for
looks is not negative. Further looks follow when this budget, in seconds, covers the expected loss of a look. Each step
adds `EXPLORE` times the largest possible gain of a larger width to the budget. This gain assumes that a draft beyond
the present width is accepted whenever all drafts before it are. A change of width costs nothing, so there is no
threshold for it.

Start-up may have measured a width too slow, and a width that is never chosen is never timed. So a width that would win
if its time was shorter by a factor (`DOUBT`) gets a trial: a few steps in a row, until some of them are timed.

The policy runs on the host in plain Python, with counts that arrive one or two steps late. numpy calls between two
steps would be slow on a CPU whose caches a model has just filled. Ranks have equal counts and choose equal widths.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from sglang_dflash.engine.width.acceptance import Acceptance
from sglang_dflash.engine.width.cost import RECENT, StepCost

# Fraction of a larger width's possible gain that each step adds to the budget. At most this fraction of the step's time
# is added.
EXPLORE = 0.01
LOOK_ROWS = 512  # rows of a look; at 256 requests whole blocks of 16 would take a third of a second on an H200
REST = 6  # number of steps of one token in a rest; longer rests have no further effect
REST_DECAY = math.exp(-1 / 128)  # a step with drafts multiplies the weight of earlier such steps by this, see `Rhythm`
REST_PRIOR = 64.0  # weight of the prior (a factor of 1) in the factors of `Rhythm`, in drafts
SETTLE = 32  # number of steps between two calls of `StepCost.settle`
EARLY = (SETTLE // 4, SETTLE // 2)  # early steps that also call `settle`, because times from start-up may be wrong
TRIAL, TIMED = 6, 2  # largest number of steps of a trial, and number of timed ones after which it ends
# Factors by which a width's estimated time may be too long: DOUBT if the width has fewer than RECENT real steps, and
# OLD_DOUBT if its last real step is old (`AGAIN`).
DOUBT, OLD_DOUBT = 2.0, 1.25
AGAIN = 1024  # a width may have another trial if none of this many last real steps had it
PART = 16  # largest number of requests whose outcomes a step counts; the host would take milliseconds for hundreds
MARGIN = 1.02  # a trial must promise this rate, relative to the best one


class Decision(NamedTuple):
    """Decision about one step."""

    width: int
    expected: float = 0.0  # expected committed tokens per request; 0: the policy does not estimate them
    # Expected accepted drafts per request by `Acceptance` alone, without a factor for rests.
    n_drafts: float = 0.0
    rested: bool = False  # whether at least `REST` steps of one token precede the step


class Policy(ABC):
    """Policy that chooses widths. All ranks must choose equal widths."""

    name: str
    cost: StepCost | None = None  # None: the policy does not use costs

    @abstractmethod
    def decide(self, rids: Sequence[str]) -> Decision:
        """Return the decision for the next step of these requests."""

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
        """Draw a width. All ranks draw equal widths, because their generators have equal seeds."""
        return Decision(self.random.choice(self.widths))


class Rhythm:
    """Factors that correct the expected number of accepted drafts: one for blocks without a rest, one after a rest.

    `Acceptance` does not consider rests. So the ratio of accepted to expected drafts is computed for each kind of
    block. A factor is this ratio, divided by the ratio for all blocks. With little evidence a factor is near 1.
    """

    def __init__(self) -> None:
        # Faded sums of drafts: in blocks without a rest before them, and in blocks after a rest.
        self.accepted_2, self.expected_2 = [0.0, 0.0], [0.0, 0.0]

    def factors(self) -> list[float]:
        """Return the factor for blocks without a rest before them, and the factor for blocks after a rest."""
        level = (sum(self.accepted_2) + 1) / (sum(self.expected_2) + 1)
        return [(self.accepted_2[i] / level + REST_PRIOR) / (self.expected_2[i] + REST_PRIOR) for i in (0, 1)]

    def observe(self, rested: bool, accepted: float, expected: float) -> None:
        """Record a step with drafts.

        Args:
            rested: whether a rest preceded the step.
            accepted: number of accepted drafts, mean over the requests.
            expected: number of accepted drafts that `Acceptance` expects, before a factor; mean over the requests.
        """
        self.accepted_2 = [REST_DECAY * before + accepted * (i == rested) for i, before in enumerate(self.accepted_2)]
        self.expected_2 = [REST_DECAY * before + expected * (i == rested) for i, before in enumerate(self.expected_2)]


class Trials:
    """Trials of widths: when one begins, goes on and ends."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.running: tuple[int, int] | None = None  # number of requests, and the width
        # Number of the width's real times when the trial began, and number of steps that it may still have.
        self.n_before, self.n_left = 0, 0
        # Steps until the next trial may begin. A trial with too few timed steps sets them to `wait`.
        self.n_pause, self.wait = 0, SETTLE

    def next(self, n_requests: int, wanted: int | None) -> int | None:
        """Return the width of a step in a trial; None: the step is not part of a trial.

        A trial may end with too few timed steps, for example because of prompts in between. Then the next trial waits,
        each time twice as long.

        `wanted`: width for a new trial; None: no width needs one.
        """
        self.n_pause = max(self.n_pause - 1, 0)
        if self.running is not None:
            size, width = self.running
            was_timed = self.cost.n_real(size, width) >= self.n_before + TIMED
            is_alike = self.cost.nearest(size, width) == self.cost.nearest(n_requests, width)
            if is_alike and self.n_left and not was_timed:
                self.n_left -= 1
                return width
            self.running = None
            # `wanted` was decided before these times were known. The next review comes within `n_parts_of` steps.
            self.n_pause, self.wait = (
                (n_parts_of(size), SETTLE) if was_timed else (self.wait, min(2 * self.wait, AGAIN))
            )
        if wanted is None or self.n_pause:
            return None
        self.running, self.n_before = (n_requests, wanted), self.cost.n_real(n_requests, wanted)
        self.n_left = TRIAL - 1
        return wanted


class Review(NamedTuple):
    """Best decision for a batch at the current estimates, and the cost and possible gain of a look."""

    rest: int  # number of steps of one token before each drafted block
    best: Decision  # decision for the step after a rest
    look: Decision  # decision for a look
    trial: int | None  # width of a trial; None: no width needs one
    unrested: dict[int, Decision]  # by width, decision for a step without a rest before it
    look_s: float  # seconds of a look
    price_s: float  # expected loss of a look, in seconds
    saving_s: float  # seconds that each step adds to the budget for looks


class Adaptive(Policy):
    """Policy that maximises committed tokens per second over width and rest."""

    cost: StepCost

    def __init__(self, widths: Sequence[int], cost: StepCost) -> None:
        """`widths`: ascending; the last one is the width of a look, except in large batches."""
        self.name, self.widths, self.cost = "auto", tuple(widths), cost
        self.cycles = [(rest, width) for width in widths for rest in (0, REST) if rest == 0 or widths[0] == 1 < width]
        self.acceptance, self.rhythm = Acceptance(widths[-1] - 1), Rhythm()
        self.review: Review | None = None  # for the requests `reviewed`
        self.reviewed: Sequence[str] = ()
        self.is_stale = True  # whether estimates have changed since the last review
        # Numbers of steps, of outcomes, and of steps since the last step with drafts; budget for looks in seconds.
        self.n_steps, self.n_observed, self.n_rested, self.saved_s = 0, 0, 0, 0.0
        self.drafted = set[str]()  # requests that have had a step with drafts
        self.trials = Trials(cost)

    def decide(self, rids: Sequence[str]) -> Decision:
        """Choose the best width, one token during a rest, or a look. The module docstring defines rests and looks."""
        self.n_steps += 1
        if self.n_steps % SETTLE == 0 or self.n_steps in EARLY or self.cost.has_news:
            self.cost.settle()
            self.is_stale = True
        n_parts = n_parts_of(len(rids))
        may_wait = n_parts == n_parts_of(len(self.reviewed)) and self.n_steps % n_parts != 0  # never with one part
        if not may_wait and (self.is_stale or rids != self.reviewed):
            self.review, self.reviewed, self.is_stale = self._review(rids), rids, False
        review = self.review
        assert review is not None
        self.saved_s = min(self.saved_s + review.saving_s, review.look_s)
        decision = review.best if self.n_rested >= review.rest else Decision(1, expected=1.0)
        # If drafted blocks follow rests, the budget pays for a look only directly after a drafted block. So this look
        # has no rest before it.
        may_look = self.saved_s >= review.price_s and (review.best.width == 1 or self.n_rested == 0)
        must_look = self.drafted.isdisjoint(rids) and (len(rids) == 1 or self.saved_s >= 0)
        had_trial = self.trials.running is not None
        trial = None if must_look else self.trials.next(len(rids), review.trial)
        self.is_stale |= had_trial and self.trials.running is None  # the times of the trial change the review
        if trial is not None:
            decision = review.unrested[trial]
        elif may_look or must_look:
            decision = review.look
            # In a batch the budget may become negative. Then new requests cause no look until the budget is 0 again.
            # The first look of a request that runs alone adds no debt, but leaves that of earlier batches.
            debt_s = min(self.saved_s, 0.0) if len(rids) == 1 else -math.inf
            self.saved_s = max(self.saved_s - review.price_s, debt_s)
        if decision.width > 1:
            self.drafted.update(rids)
            if len(self.drafted) > 4 * len(rids) + 64:  # most of these requests have ended
                self.drafted.intersection_update(rids)
        rested = self.n_rested >= REST
        self.n_rested = self.n_rested + 1 if decision.width == 1 else 0
        return decision._replace(rested=rested)

    def _best(self, seconds: dict[int, float], expected: dict[tuple[int, int], float]) -> tuple[float, int, int]:
        """Return (rate, -rest, width) of the best cycle: a rest, and the step at `width` after it.

        On ties take the shortest rest, then the largest width, because it shows the outcome of most drafts. The
        arguments are those of `_doubted`.
        """
        return max(
            ((rest + expected[rest, width]) / (rest * seconds[self.widths[0]] + seconds[width]), -rest, width)
            for rest, width in self.cycles
        )

    def _review(self, rids: Sequence[str]) -> Review:
        committed_N = self.acceptance.expected(rids)
        seconds = dict(zip(self.widths, self.cost.of(len(rids)), strict=True))
        factors = dict(zip((0, REST), self.rhythm.factors(), strict=True))
        expected = {
            (rest, width): 1 + min(factor * (committed_N[width] - 1), width - 1)
            for rest, factor in factors.items()
            for width in self.widths
        }
        rate, minus_rest, width = self._best(seconds, expected)
        rest = -minus_rest
        usual = 1 if rest else width
        wide = max(usual, self._look_width(len(rids)))
        look = Decision(wide, expected[REST if width == 1 else 0, wide], committed_N[wide] - 1)
        # Upper bound of the gain of larger widths: each further slot gains as much as the last one of the usual width.
        gain = committed_N[usual] - committed_N[usual - 1]
        hoped = max((expected[0, usual] + gain * (w - usual)) / seconds[w] for w in self.widths if w >= usual)
        return Review(
            rest,
            best=Decision(width, expected[rest, width], committed_N[width] - 1),
            look=look,
            look_s=seconds[wide],
            # The best cycle, its rest included, commits as many tokens in `look.expected / rate` seconds.
            price_s=seconds[wide] - look.expected / rate,
            saving_s=EXPLORE * min(max(hoped / rate - 1, 0), 1) * seconds[usual],
            trial=self._doubted(len(rids), seconds, expected, usual),
            unrested={w: Decision(w, expected[0, w], committed_N[w] - 1) for w in self.widths},
        )

    def _look_width(self, n_requests: int) -> int:
        """Return the largest width at which a look verifies at most `LOOK_ROWS` rows, or else the second width."""
        return max((w for w in self.widths[2:] if n_requests * w <= LOOK_ROWS), default=self.widths[:2][-1])

    def _doubted(
        self, n_requests: int, seconds: dict[int, float], expected: dict[tuple[int, int], float], usual: int
    ) -> int | None:
        """Return the width whose trial promises most; None: no width could win.

        Args:
            seconds: estimated time of a step, by width.
            expected: expected committed tokens, by number of steps of one token before a block, and width.
            usual: width of most steps. Before its real times are known, no other width gets a trial.
        """
        if self.cost.n_real(n_requests, usual) < RECENT:
            return None
        most, promising = MARGIN * self._best(seconds, expected)[0], None
        least_s = 0.0  # a wider step takes no less than a narrower one whose times are known
        for width in self.widths:
            n_real, last = self.cost.n_real(n_requests, width), self.cost.last(n_requests, width)
            if n_real >= RECENT:
                least_s = max(least_s, seconds[width])
            if width == usual or (n_real >= TIMED and self.cost.n_observed - last < AGAIN):
                continue
            shorter = max(seconds[width] / (DOUBT if n_real < RECENT else OLD_DOUBT), least_s)
            rate = self._best(seconds | {width: shorter}, expected)[0]
            if rate > most:
                most, promising = rate, width
        return promising

    def observe(self, rids: Sequence[str], decision: Decision, n_accepted_B: Sequence[int]) -> None:
        """Update the estimates of acceptance, and of the effect of rests."""
        self.n_observed += 1
        n_parts = n_parts_of(len(rids))
        self.acceptance.observe(rids, decision.width, n_accepted_B, slice(self.n_observed % n_parts, None, n_parts))
        if decision.width > 1:
            self.rhythm.observe(decision.rested, sum(n_accepted_B) / len(n_accepted_B), decision.n_drafts)
            self.is_stale = True


def n_parts_of(n_requests: int) -> int:
    """Return the number of parts into which a batch is split. A step counts the outcomes of one part only."""
    return -(-n_requests // PART)
