"""Width: how many tokens of a drafted block the target verifies.

Verifying w tokens commits, on average over the requests of a batch,

    E(w) = S_0 + S_1 + ... + S_(w-1)

tokens, where S_i is the probability that drafts 1..i are all accepted (S_0 = 1 is the bonus), and the step takes
T(B, w) seconds. The policy takes the width that commits most per second, over all widths: on a GPU T is a staircase,
so a neighbour that is worse says nothing about the one behind it. Width 1 is no speculation: nothing is drafted.

Whoever verifies w tokens learns about every narrower width, and nothing about a wider one. Belief about unseen
positions is therefore drawn from the positions before them, and a part of the time goes into looking: a step at full
width is taken when what it is expected to lose has been saved up. `EXPLORE` of what a wider block would win is saved,
were all unseen drafts accepted: no more can be won, so where even that would hardly pay, hardly anything is spent. A
switch costs nothing (every width has its own graphs), so there is no hysteresis but this: forgetting is slow enough
not to follow noise.

Everything here runs on the host, between steps, from counts that reached it anyway, one or two steps late. Ranks that
are given the same counts and costs decide the same. Knows nothing of SGLang or torch.

Where drafts fail they fail in clusters: right after a rejection the next one fails more often than some tokens later.
So besides a width the policy chooses a rest, steps of one token between two drafts: of all cycles of r such steps and
a draft of which w tokens are verified, the one with the highest (r + E_r(w)) / (r T(B, 1) + T(B, w)).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sglang_dflash.width.cost import Cost

EXPLORE = 0.01  # of what wider blocks could win, and of the time at most, is lost by looking at them
MEMORY = 32  # steps after which an observation's weight has fallen to 1/e
SETTLE = 32  # steps after which what steps were observed to take begins to count
REVIEW = 8  # drafts after which a width that has been the best for as many is chosen anew; before that, one
PRIOR = 4.0  # observations that a belief weighs as much as
RESTS = 0, 1, 2, 4, 8  # steps of one token that are considered between two drafts
RESTED = 6  # such steps after which waiting changes nothing more
REST_MEMORY = 128  # drafts after which what was seen of rests weighs 1/e
REST_PRIOR = 64.0  # accepted drafts that the belief that rest changes nothing weighs as much as


class Acceptance:
    """The probability that a draft is accepted when those before it are, by request and position.

    A request's own counts are drawn towards the batch's, those of the batch towards what was believed of the position
    when it was last reached; if it never was, towards what is believed of the position before. (Not always towards
    that one: where drafts succeed in bursts, a position is accepted the more often the later it is.) Requests seen
    longest ago are forgotten.
    """

    def __init__(self, n_drafts: int, n_requests: int) -> None:
        """`n_requests` are remembered, at least as many as run at a time."""
        self.row_of = OrderedDict[str, int]()
        self.free = list(range(n_requests))
        self.counts_R2D = np.zeros((n_requests, 2, n_drafts))  # how often a position was reached, and accepted
        self.batch_2D = np.zeros((2, n_drafts))
        # Believed of a position when it was last reached. At the start the best of the first: that looks at everything.
        self.lasting_D: list[float | None] = [1.0] + [None] * (n_drafts - 1)
        self.keep = math.exp(-1 / MEMORY)
        self.seen_WA2D = _seen(n_drafts)
        # Steps not counted yet: how many were observed before, width, accepted. All of these requests.
        self.unheard: list[tuple[int, int, Sequence[int]]] = []
        self.unheard_rids: Sequence[str] = ()
        self.n_observed = self.n_heard = 0

    def observe(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int]) -> None:
        """A step at `width` accepted the first n of its width - 1 drafts."""
        if width > 1:  # a step of one token says nothing, but time passes
            if rids != self.unheard_rids or len(self.unheard) == REVIEW:
                self._hear()
                self.unheard_rids = rids
            self.unheard.append((self.n_observed, width, n_accepted_B))
        self.n_observed += 1

    def _hear(self) -> None:
        """Count what was observed since the last time, and forget as much as time has passed."""
        kept = self.keep ** (self.n_observed - self.n_heard)
        self.n_heard = self.n_observed
        self.counts_R2D *= kept
        self.batch_2D *= kept
        if not self.unheard:
            return
        # What each step says weighs less the more steps came after it.
        seen_KB2D = [
            self.seen_WA2D[width].take(n_accepted_B, axis=0) * self.keep ** (self.n_observed - 1 - when)
            for when, width, n_accepted_B in self.unheard
        ]
        self.unheard.clear()
        seen_B2D = np.add.reduce(seen_KB2D)
        self.counts_R2D[self._rows(self.unheard_rids)] += seen_B2D
        seen_2D = np.add.reduce(seen_B2D)
        self.batch_2D += seen_2D
        most = len(seen_B2D) / (1 - self.keep)  # what a batch of this size comes to in the end
        if self.batch_2D[0, 0] > most:  # a larger one was here, whose steps said more: it must not be heard for longer
            self.batch_2D *= most / self.batch_2D[0, 0]
        n_reached = np.count_nonzero(seen_2D[0])
        self.lasting_D[:n_reached] = self._of_batch()[:n_reached]

    def expected(self, rids: Sequence[str]) -> np.ndarray:
        """E(1) .. E(N), the mean over the requests."""
        self._hear()
        batch_D = self._of_batch()
        drawn_to_2D = PRIOR * np.array(([1.0] * len(batch_D), batch_D))
        counts_B2D = self.counts_R2D.take(self._rows(rids), axis=0) + drawn_to_2D
        survival_BD = np.multiply.accumulate(counts_B2D[:, 1] / counts_B2D[:, 0], axis=1)
        committed_N = np.ones(len(batch_D) + 1)
        committed_N[1:] += np.add.accumulate(np.add.reduce(survival_BD)) / len(rids)
        return committed_N

    def _of_batch(self) -> list[float]:
        """What is believed of every position, whatever the request."""
        believed, batch_D = 1.0, []
        for reached, accepted, lasting in zip(*self.batch_2D.tolist(), self.lasting_D, strict=True):
            believed = (accepted + PRIOR * (believed if lasting is None else lasting)) / (reached + PRIOR)
            batch_D.append(believed)
        return batch_D

    def _rows(self, rids: Sequence[str]) -> list[int]:
        return [self._row(rid) for rid in rids]

    def _row(self, rid: str) -> int:
        row = self.row_of.get(rid)
        if row is None:
            row = self.free.pop() if self.free else self.row_of.popitem(last=False)[1]
            self.counts_R2D[row] = 0.0
            self.row_of[rid] = row
        else:
            self.row_of.move_to_end(rid)
        return row


def _seen(n_drafts: int) -> np.ndarray:
    """What a step says of every position, reached and accepted, by its width and by how many drafts it accepted."""
    position_D = np.arange(1, n_drafts + 1)
    width_W = np.arange(n_drafts + 2)[:, None, None]
    accepted_A = np.arange(n_drafts + 1)[:, None]
    reached_WAD = (position_D <= accepted_A + 1) & (position_D < width_W)
    accepted_WAD = np.broadcast_to(position_D <= accepted_A, reached_WAD.shape)
    return np.stack((reached_WAD, accepted_WAD), axis=2).astype(float)


class Rhythm:
    """How much more often drafts are accepted some tokens after the last draft than right after it.

    Two factors on the number that is expected to be accepted, for a draft right after another and for one after
    `RESTED` steps of one token, and a straight line between them. Each is accepted over expected, as a share of what
    that is over all drafts, drawn to 1: how often drafts are accepted at all is not said here.
    """

    def __init__(self) -> None:
        # Of drafts right after another, of rested ones; a draft in between counts for both in part.
        self.accepted_2, self.expected_2 = [0.0, 0.0], [0.0, 0.0]
        self.keep = math.exp(-1 / REST_MEMORY)

    def factors(self, *rests: int) -> list[float]:
        """On the accepted drafts, for each number of steps of one token before them."""
        of_all = (sum(self.accepted_2) + 1) / (sum(self.expected_2) + 1)
        after_draft, after_rest = (
            (accepted / of_all + REST_PRIOR) / (expected + REST_PRIOR)
            for accepted, expected in zip(self.accepted_2, self.expected_2, strict=True)
        )
        return [after_draft + min(rested / RESTED, 1) * (after_rest - after_draft) for rested in rests]

    def observe(self, rested: int, accepted: float, expected: float) -> None:
        """A draft's outcome, the mean over the requests; `expected` with the factor."""
        share, (factor,) = min(rested / RESTED, 1), self.factors(rested)
        for i, part in enumerate((1 - share, share)):
            self.accepted_2[i] = self.accepted_2[i] * self.keep + part * accepted
            self.expected_2[i] = self.expected_2[i] * self.keep + part * expected / factor


class Decision(NamedTuple):
    """The width of a step, and what was expected of every width when it was chosen."""

    width: int
    committed: Mapping[int, float] = {}  # by width: tokens of one request
    seconds: Mapping[int, float] = {}  # by width: a step of the whole batch
    rested: int = 0  # steps of one token before it, if it drafts


class Outlook(NamedTuple):
    """What is best for some requests by what is known now, and what looking at full width is worth."""

    best: Decision
    rest: int  # steps of one token before `best`
    pause: Decision  # such a step
    look: Decision
    saving_s: float  # what looking may cost, by every step
    price_s: float  # of a look


class Adaptive:
    """The width, and the rest, with the most committed tokens per second.

    Invariant: `outlook` is that of `rids`, or None; since it was made nothing was learned, or what less than `REVIEW`
    drafts say of a width that has long been the best.
    """

    name = "auto"

    def __init__(self, widths: Sequence[int], acceptance: Acceptance, cost: Cost) -> None:
        """`widths` ascending, the last one the block."""
        self.widths = tuple(widths)
        self.rests = RESTS if self.widths[0] == 1 else RESTS[:1]
        self.acceptance = acceptance
        self.rhythm = Rhythm()
        self.cost = cost
        self.rids: Sequence[str] = ()
        self.outlook: Outlook | None = None
        self.saved_s = 0.0  # what looking may cost
        self.n_rested = 0  # steps of one token since the last draft
        self.n_steps = 0
        self.width_before, self.n_alike = 0, 0  # of the last draft, and how many before it in a row had that width
        self.timed_width, self.n_untimed = 0, 0  # of the last step that was timed, and how many steps ago that was

    def decide(self, rids: Sequence[str]) -> Decision:
        """For the next step of these requests."""
        self.n_steps += 1
        if self.n_steps % SETTLE == 0:
            self.cost.settle()
            self.outlook = None
        if self.outlook is None or rids != self.rids:
            self.rids, self.outlook = rids, self._outlook(rids)
        best, rest, pause, look, saving_s, price_s = self.outlook
        self.saved_s = min(self.saved_s + saving_s, look.seconds[look.width])
        decision = best if self.n_rested >= rest else pause
        # Where drafts rest, what is looked at is one that does not.
        if self.saved_s >= price_s and (best.width == 1 or self.n_rested == 0):
            self.saved_s -= price_s
            decision = look
        if decision.width == 1:
            self.n_rested += 1
            return decision
        if self.n_rested > 0:
            decision = decision._replace(rested=self.n_rested)
            self.n_rested = 0
        return decision

    def _outlook(self, rids: Sequence[str]) -> Outlook:
        # Plain arithmetic: between two steps on a CPU whose caches a model has just swept, calls of numpy are dear.
        committed_N = self.acceptance.expected(rids).tolist()
        seconds = dict(zip(self.widths, self.cost.of(len(rids)).tolist(), strict=True))
        pause_s, block = seconds[self.widths[0]], self.widths[-1]
        committed = {
            rest: {width: 1 + min(factor * (committed_N[width - 1] - 1), width - 1) for width in self.widths}
            for rest, factor in zip(self.rests, self.rhythm.factors(*self.rests), strict=True)
        }
        # Of equals the one that rests least and is widest, which learns most.
        rate, minus_rest, width = max(
            ((rest + committed[rest][width]) / (rest * pause_s + seconds[width]), -rest, width)
            for rest in self.rests
            for width in self.widths
        )
        rest = -minus_rest
        if rest > 0:
            hoped = block / seconds[block]
        else:  # the highest rate of a wider block, were all it adds accepted
            survival = committed_N[width - 1] - committed_N[width - 2] if width > 1 else 1.0
            wider = [other for other in self.widths if other >= width]
            hoped = max((committed[0][width] + survival * (other - width)) / seconds[other] for other in wider)
        looked_at = committed[0 if width > 1 else self.rests[-1]]
        best = Decision(width, committed[rest], seconds)
        return Outlook(
            best=best,
            rest=rest,
            pause=best._replace(width=1),
            look=Decision(block, looked_at, seconds),
            saving_s=EXPLORE * min(hoped / rate - 1, 1) * (pause_s if rest > 0 else seconds[width]),
            price_s=seconds[block] - looked_at[block] / rate,  # beyond as many tokens at the best rate
        )

    def observe(self, rids: Sequence[str], decision: Decision, n_accepted_B: Sequence[int]) -> None:
        """A step's outcome."""
        width = decision.width
        self.acceptance.observe(rids, width, n_accepted_B)
        if width > 1:
            self.rhythm.observe(decision.rested, sum(n_accepted_B) / len(n_accepted_B), decision.committed[width] - 1)
            self.n_alike = self.n_alike + 1 if width == self.width_before else 0
            self.width_before = width
            if self.n_alike < REVIEW or self.n_alike % REVIEW == 0:
                self.outlook = None

    def seconds(self) -> dict[str, dict[str, float]]:
        """By requests, then by width: what a step is believed to take."""
        return self.cost.by_size()

    def time(self, n_requests: int, width: int, seconds: float) -> None:
        """What a step took; of steps alike one in `REVIEW` is enough."""
        self.n_untimed += 1
        if width != self.timed_width or self.n_untimed == REVIEW:
            self.timed_width, self.n_untimed = width, 0
            self.cost.observe(n_requests, width, seconds)
