"""Estimates of draft acceptance for each request of a batch, from earlier steps."""

import math
from collections.abc import Sequence
from itertools import accumulate

DECAY = math.exp(-1 / 32)  # per step, factor on the weight of old observations of one request
HEAVY = 1e100  # new observations weigh more at each step (see `Counts`); above this, all weights are scaled down
ALL_DECAY = math.exp(-1 / 256)  # per step, factor on the weight of old observations of all requests
PRIOR = 4.0  # weight of the prior, in observations
LEVEL_DECAY = math.exp(-1 / 8)  # per block, factor on the weight of old evidence about a request's level
# Weight of a level's prior, in drafts: for the level of a block's first draft, and for that of the others.
FIRST_PRIOR, FURTHER_PRIOR = 2.0, 8.0
# Weights, in drafts, of the prior of the level of new requests. The prior itself is 1. Each further new request
# multiplies the weight of earlier evidence by NEW_DECAY.
NEW_FIRST_PRIOR, NEW_FURTHER_PRIOR, NEW_DECAY = 8.0, 16.0, 0.7
CERTAIN = 0.02  # probabilities are clamped to [CERTAIN, 1 - CERTAIN]
WARM_UP = 8  # output tokens; requests up to this length (a server's warm-up) stay out of the counts of all requests

# For each draft position: weighted number of times all drafts before it were accepted (it was "reached"), and weighted
# number of times it was accepted. Old observations must lose weight at each step. To save time, the weights stay, and
# each step's observations get a larger weight than the step before. Above `HEAVY` all weights are scaled down.
Counts = list[tuple[float, float]]


ALL = slice(None)


class Level:
    """Level of some blocks: their odds of acceptance, divided by the usual odds (of all requests)."""

    def __init__(self, weight: float, decay: float = LEVEL_DECAY) -> None:
        """Begin without blocks.

        Args:
            weight: weight of the prior, as a number of drafts.
            decay: factor per block on the weight of old evidence.
        """
        self.weight, self.decay = weight, decay
        self.n_reached, self.n_accepted, self.n_usual = 0.0, 0.0, 0.0

    def observe(self, usual_D: Sequence[float], n_accepted: int) -> None:
        """Count a block.

        Args:
            usual_D: acceptance probability over all requests, of each draft that was reached.
            n_accepted: number of accepted drafts among these.
        """
        if usual_D:
            self.n_reached = self.decay * self.n_reached + len(usual_D)
            self.n_accepted = self.decay * self.n_accepted + n_accepted
            self.n_usual = self.decay * self.n_usual + sum(usual_D)

    def odds(self, prior: float = 1.0) -> float:
        """Return the level: the factor between these odds and the usual odds; `prior`: the level without blocks."""
        if not self.n_reached:
            return prior
        usual = self.n_usual / self.n_reached
        assumed = probability(prior * odds(usual))
        return odds((self.n_accepted + self.weight * assumed) / (self.n_reached + self.weight)) / odds(usual)


class Levels:
    """Levels of a block's first draft and of its further drafts.

    A block whose first draft fails is no evidence about further drafts, so these have their own level.
    """

    def __init__(self, first: Level, further: Level) -> None:
        self.first, self.further = first, further

    def observe(self, usual_D: Sequence[float], n_accepted: int) -> None:
        """Count a block, see `Level.observe`."""
        self.first.observe(usual_D[:1], min(n_accepted, 1))
        self.further.observe(usual_D[1:], max(n_accepted - 1, 0))

    def odds(self, priors: tuple[float, float] = (1.0, 1.0)) -> tuple[float, float]:
        """Return both levels; `priors`: the levels without blocks."""
        return self.first.odds(priors[0]), self.further.odds(priors[1])


class Own:
    """Counts and levels of one request."""

    def __init__(self, nothing: Counts) -> None:
        self.counts, self.n_tokens = nothing[:], 0
        self.levels = Levels(Level(FIRST_PRIOR), Level(FURTHER_PRIOR))
        self.is_new = True  # whether none of its blocks with drafts is in the counts of all requests
        # Width and number of accepted drafts of each step, while the request has at most WARM_UP output tokens. These
        # steps are not yet in the counts of all requests. None: the request has more output tokens, and each of its
        # steps is counted immediately.
        self.kept: list[tuple[int, int]] | None = []


class Acceptance:
    """Estimator, by request and position, of the probability that a draft is accepted if all drafts before it are.

    There are two estimates, and both combine counts with a prior:

    - For a request: the request's own counts. The prior is the estimate over all requests, with its odds multiplied by
      the request's level (`Level`).
    - Over all requests: the counts of all requests. The prior is the last estimate at the position. If the position was
      never reached, the prior is the estimate at the position before.

    Requests with many drafted blocks dominate the counts of all requests. So the estimate over all requests may be
    wrong for a new request. Therefore a request's level has a prior, the level of new requests. The first block with
    drafts of each request is the evidence for this prior.

    Older steps weigh less. A request's counts fade by `DECAY`. The counts of all requests fade by the slower
    `ALL_DECAY`. Otherwise the last request would determine the estimate for a new one.
    """

    def __init__(self, n_drafts: int) -> None:
        self.weight, self.all_weight = 1.0, 1.0  # weights of a new observation, see `Counts`
        self.nothing = [(0.0, 0.0)] * n_drafts
        self.batch, self.of_request = self.nothing[:], dict[str, Own]()
        self.unseen = Own(self.nothing)  # stands for a request without an observed step
        self.new = Levels(Level(NEW_FIRST_PRIOR, NEW_DECAY), Level(NEW_FURTHER_PRIOR, NEW_DECAY))
        self.last_D: list[float | None] = [1.0] + [None] * (n_drafts - 1)  # 1.0 at first, so that every width is tried

    def observe(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int], part: slice = ALL) -> None:
        """Count a step at `width`.

        Args:
            n_accepted_B: number of accepted drafts of each request, 0..width - 1.
            part: requests of the batch to count. If each step counts another part, a request's own counts grow more
                slowly.
        """
        self._fade()
        all_D, n_counted = self._of_all() if width > 1 else [], len(rids[part])
        for rid, n_accepted in zip(rids[part], n_accepted_B[part], strict=True):
            own = self.of_request.get(rid)
            if own is None:
                own = self.of_request[rid] = Own(self.nothing)
            own.n_tokens += n_accepted + 1
            if width > 1:
                count(own.counts, width, n_accepted, self.weight)
                own.levels.observe(all_D[: min(n_accepted + 1, width - 1)], n_accepted)
            if width > 1 or own.kept is not None:
                self._share(own, width, n_accepted, n_counted)
        if len(self.of_request) > 4 * len(rids) + 64:  # most of these requests have ended
            self.of_request = {rid: self.of_request[rid] for rid in rids if rid in self.of_request}

    def _fade(self) -> None:
        self.weight /= DECAY
        self.all_weight /= ALL_DECAY
        if self.weight > HEAVY:
            for own in self.of_request.values():
                own.counts = scaled(own.counts, 1 / self.weight)
            self.weight = 1.0
        if self.all_weight > HEAVY:
            self.batch, self.all_weight = scaled(self.batch, 1 / self.all_weight), 1.0

    def _share(self, own: Own, width: int, n_accepted: int, n_requests: int) -> None:
        """Add a step to the counts over all requests, or keep it while its request may be a warm-up request.

        Kept steps are added once the request has more than `WARM_UP` output tokens.
        """
        steps = [*(own.kept or ()), (width, n_accepted)]
        if own.kept is not None and own.n_tokens <= WARM_UP:
            own.kept = steps
            return
        own.kept = None
        for width, n_accepted in steps:
            if width == 1:
                continue
            n_reached = min(n_accepted + 1, width - 1)
            if own.is_new:
                self.new.observe(self._of_all(n_reached), n_accepted)
                own.is_new = False
            count(self.batch, width, n_accepted, self.all_weight)
            # Scale the counts down to the largest total that batches of this size can reach. Otherwise counts of
            # earlier, larger batches would outweigh new steps.
            most = n_requests * self.all_weight / (1 - ALL_DECAY)
            if self.batch[0][0] > most:
                self.batch = scaled(self.batch, most / self.batch[0][0])
            self.last_D[:n_reached] = self._of_all(n_reached)

    def expected(self, rids: Sequence[str]) -> list[float]:
        """Return the expected number of committed tokens per request, at each width from 0 to the largest."""
        all_D, new = self._of_all(), self.new.odds()
        total_D = [0.0] * len(all_D)
        for rid in rids:
            survival = 1.0
            for i, p in enumerate(self._of_one(self.of_request.get(rid, self.unseen), all_D, new)):
                survival *= p
                total_D[i] += survival
        return [0.0, *accumulate((total / len(rids) for total in total_D), initial=1.0)]

    def _of_one(self, own: Own, all_D: Sequence[float], new: tuple[float, float]) -> list[float]:
        """Return a request's estimates, [D].

        Args:
            all_D: the estimates over all requests.
            new: the levels of new requests.
        """
        (first, further), prior = own.levels.odds(new), PRIOR * self.weight
        odds_D = [(further if i else first) * odds(p) for i, p in enumerate(all_D)]
        return [
            (accepted + prior * probability(x)) / (reached + prior)
            for (reached, accepted), x in zip(own.counts, odds_D, strict=True)
        ]

    def _of_all(self, n: int | None = None) -> list[float]:
        """Return the estimates over all requests, at the first `n` positions; None: at all positions."""
        p, prior, batch_D = 1.0, PRIOR * self.all_weight, []
        for (reached, accepted), last in zip(self.batch[:n], self.last_D[:n], strict=True):
            p = (accepted + prior * (p if last is None else last)) / (reached + prior)
            batch_D.append(p)
        return batch_D


def count(counts: Counts, width: int, n_accepted: int, weight: float) -> None:
    """Add to `counts` a step at `width` that accepted `n_accepted` drafts."""
    for i, (reached, accepted) in enumerate(counts[: min(n_accepted + 1, width - 1)]):
        counts[i] = reached + weight, accepted + weight * (i < n_accepted)


def odds(p: float) -> float:
    """Return p / (1 - p), with p clamped to [CERTAIN, 1 - CERTAIN]."""
    p = min(max(p, CERTAIN), 1 - CERTAIN)
    return p / (1 - p)


def probability(x: float) -> float:
    """Return the probability with odds `x`."""
    return x / (1 + x)


def scaled(counts: Counts, factor: float) -> Counts:
    return [(factor * reached, factor * accepted) for reached, accepted in counts]
