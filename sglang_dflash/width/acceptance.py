"""Estimates of draft acceptance for each request of a batch, from earlier steps."""

import math
from collections.abc import Sequence
from itertools import accumulate

DECAY = math.exp(-1 / 32)  # per step: how fast an observation fades
HEAVY = 1e100  # weight above which all weights are scaled down
ALL_DECAY = math.exp(-1 / 512)  # per step: how fast an observation fades in the counts of all requests
PRIOR = 4.0  # weight of the prior, in observations
LEVEL_DECAY = math.exp(-1 / 8)  # per block: how fast evidence about a request's level fades
FIRST_PRIOR, FURTHER_PRIOR = 2.0, 8.0  # weights of the usual level in a request's level, in drafts: first, further ones
CERTAIN = 0.02  # probabilities are clamped to [CERTAIN, 1 - CERTAIN]
WARM_UP = 8  # tokens; shorter requests, such as a server's warm-up, do not enter the counts of all requests

Counts = list[tuple[float, float]]  # by position: weighted number of times it was reached, and of times it was accepted


class Level:
    """Ratio of one request's odds of acceptance to those of all requests, from the request's last blocks."""

    def __init__(self, prior: float) -> None:
        """`prior`: weight of the usual level, in drafts."""
        self.prior, self.n_reached, self.n_accepted, self.n_usual = prior, 0.0, 0.0, 0.0

    def observe(self, usual_D: Sequence[float], n_accepted: int) -> None:
        """Count a block with its first `n_accepted` drafts accepted; `usual_D`: probabilities over all requests."""
        if usual_D:
            self.n_reached = LEVEL_DECAY * self.n_reached + len(usual_D)
            self.n_accepted = LEVEL_DECAY * self.n_accepted + n_accepted
            self.n_usual = LEVEL_DECAY * self.n_usual + sum(usual_D)

    def odds(self) -> float:
        """Return the factor on the usual odds."""
        if not self.n_reached:
            return 1.0
        usual = self.n_usual / self.n_reached
        return odds((self.n_accepted + self.prior * usual) / (self.n_reached + self.prior)) / odds(usual)


class Own:
    """Outcomes of one request."""

    def __init__(self, nothing: Counts) -> None:
        self.counts, self.n_tokens = nothing[:], 0
        # Separate, because first drafts that fail are no evidence about further drafts in other blocks.
        self.first, self.further = Level(FIRST_PRIOR), Level(FURTHER_PRIOR)
        # (width, accepted) of the first steps, not yet in the counts of all requests; None: steps count at once
        self.kept: list[tuple[int, int]] | None = []

    def observe(self, usual_D: Sequence[float], n_accepted: int) -> None:
        self.first.observe(usual_D[:1], min(n_accepted, 1))
        self.further.observe(usual_D[1:], max(n_accepted - 1, 0))


class Acceptance:
    """Estimator of the probability that a draft is accepted if those before it are, by request and position.

    A request's counts are shrunk towards the estimate over all requests, shifted in odds by the level of the request's
    last blocks. The estimate over all requests is shrunk towards its last value at the position. For a position never
    reached, it is shrunk towards the estimate at the position before. Older steps weigh less. A request's own counts
    fade by `DECAY`, those of all requests by the slower `ALL_DECAY`, so that one request does not dominate the estimate
    for the next.
    """

    def __init__(self, n_drafts: int) -> None:
        self.weight, self.all_weight = 1.0, 1.0  # weight of an observation in this step
        self.nothing = [(0.0, 0.0)] * n_drafts
        self.batch, self.of_request = self.nothing[:], dict[str, Own]()
        self.last_D: list[float | None] = [1.0] + [None] * (n_drafts - 1)  # 1.0 at first, so that every width is tried

    def observe(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int]) -> None:
        """Count a step at `width`; `n_accepted_B`: the accepted drafts of each request, of width - 1."""
        self._fade()
        all_D = self._of_all() if width > 1 else []
        for rid, n_accepted in zip(rids, n_accepted_B, strict=True):
            own = self.of_request.setdefault(rid, Own(self.nothing))
            count(own.counts, width, n_accepted, self.weight)
            own.n_tokens += n_accepted + 1
            if width > 1:
                own.observe(all_D[: min(n_accepted + 1, width - 1)], n_accepted)
            self._share(own, width, n_accepted, len(rids))
        if len(self.of_request) > 4 * len(rids) + 64:  # most have ended
            self.of_request = {rid: self.of_request[rid] for rid in rids}

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
        """Add a step to the counts of all requests, if the request is longer than a warm-up request."""
        steps = [*(own.kept or ()), (width, n_accepted)]
        if own.kept is not None and own.n_tokens <= WARM_UP:
            own.kept = steps
            return
        own.kept = None
        for width, n_accepted in steps:
            if width == 1:
                continue
            count(self.batch, width, n_accepted, self.all_weight)
            # Cap the counts at the most that a batch of this size reaches, so that those of a larger batch fade.
            most = n_requests * self.all_weight / (1 - ALL_DECAY)
            if self.batch[0][0] > most:
                self.batch = scaled(self.batch, most / self.batch[0][0])
            n_reached = min(n_accepted + 1, width - 1)
            self.last_D[:n_reached] = self._of_all(n_reached)

    def expected(self, rids: Sequence[str]) -> list[float]:
        """Return E(0) = 0, E(1), .. E(N): expected committed tokens at each width, the mean over the requests."""
        all_D = self._of_all()
        total_D = [0.0] * len(all_D)
        for own in (self.of_request.get(rid) for rid in rids):
            survival = 1.0
            for i, p in enumerate(self._of_one(own, all_D) if own else all_D):
                survival *= p
                total_D[i] += survival
        return [0.0, *accumulate((total / len(rids) for total in total_D), initial=1.0)]

    def _of_one(self, own: Own, all_D: Sequence[float]) -> list[float]:
        """Return a request's probabilities, [D]: its own counts, with those of all requests at its level as prior."""
        first, further, prior = own.first.odds(), own.further.odds(), PRIOR * self.weight
        odds_D = [(further if i else first) * odds(p) for i, p in enumerate(all_D)]
        return [
            (accepted + prior * x / (1 + x)) / (reached + prior)
            for (reached, accepted), x in zip(own.counts, odds_D, strict=True)
        ]

    def _of_all(self, n: int | None = None) -> list[float]:
        """Return the probabilities of all requests at the first `n` positions; None: at all positions."""
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


def scaled(counts: Counts, factor: float) -> Counts:
    return [(factor * reached, factor * accepted) for reached, accepted in counts]
