"""Width: how many tokens of a drafted block the target verifies.

Verifying w tokens commits, on average over the requests of a batch,

    E(w) = S_0 + S_1 + ... + S_(w-1)

tokens, where S_i is the probability that drafts 1..i are all accepted (S_0 = 1 is the bonus), and the step takes
T(B, w) seconds. The policy takes the width that commits most per second, over all widths: on a GPU T is a staircase,
so a neighbour that is worse says nothing about the one behind it. Width 1 is no speculation: nothing is drafted.

Whoever verifies w tokens learns about every narrower width, and nothing about a wider one. Belief about unseen
positions is therefore drawn from the positions before them, and a part of the time goes into looking: a step at full
width is taken when what it is expected to lose has been saved up at `EXPLORE` of the time. A switch costs nothing
(every width has its own graphs), so there is no hysteresis but this: forgetting is slow enough not to follow noise.

Everything here runs on the host, between steps, from counts that reached it anyway, one or two steps late. Ranks that
are given the same counts and costs decide the same. Knows nothing of SGLang or torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

EXPLORE = 0.01  # of the time, at most, is lost by looking at wider blocks than pay
MEMORY = 32  # steps after which an observation's weight has fallen to 1/e
PRIOR = 4.0  # observations that a belief weighs as much as


class Acceptance:
    """The probability that a draft is accepted when those before it are, by request and position.

    A request's own counts are drawn towards the batch's, those of the batch towards what is believed of the position
    before; the first position's towards what was believed of it last. Requests seen longest ago are forgotten.
    """

    def __init__(self, n_drafts: int, n_requests: int) -> None:
        self.row_of = OrderedDict[str, int]()
        self.free = list(range(n_requests))
        self.reached_RD = np.zeros((n_requests, n_drafts))
        self.accepted_RD = np.zeros((n_requests, n_drafts))
        self.batch_reached_D = np.zeros(n_drafts)
        self.batch_accepted_D = np.zeros(n_drafts)
        self.first = 1.0  # believed of position 1; at the start the best, which looks at everything
        self.keep = np.exp(-1 / MEMORY)

    def observe(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int]) -> None:
        """A step at `width` accepted the first n of its width - 1 drafts."""
        rows_B = self._rows(rids)
        n_B1 = np.asarray(n_accepted_B)[:, None]
        position_D = np.arange(1, self.reached_RD.shape[1] + 1)
        accepted_BD = position_D <= n_B1
        reached_BD = (position_D <= n_B1 + 1) & (position_D < width)
        self.batch_reached_D = self.batch_reached_D * self.keep + reached_BD.sum(axis=0)
        self.batch_accepted_D = self.batch_accepted_D * self.keep + accepted_BD.sum(axis=0)
        self.reached_RD[rows_B] = self.reached_RD[rows_B] * self.keep + reached_BD
        self.accepted_RD[rows_B] = self.accepted_RD[rows_B] * self.keep + accepted_BD
        self.first = (self.batch_accepted_D[0] + PRIOR * self.first) / (self.batch_reached_D[0] + PRIOR)

    def expected(self, rids: Sequence[str]) -> np.ndarray:
        """E(1) .. E(N), the mean over the requests."""
        believed, batch_D = self.first, []
        for accepted, reached in zip(self.batch_accepted_D.tolist(), self.batch_reached_D.tolist(), strict=True):
            believed = (accepted + PRIOR * believed) / (reached + PRIOR)
            batch_D.append(believed)
        rows_B = self._rows(rids)
        request_BD = (self.accepted_RD[rows_B] + PRIOR * np.array(batch_D)) / (self.reached_RD[rows_B] + PRIOR)
        survival_D = request_BD.cumprod(axis=1).mean(axis=0)
        return np.concatenate(([1.0], 1.0 + survival_D.cumsum()))

    def _rows(self, rids: Sequence[str]) -> list[int]:
        return [self._row(rid) for rid in rids]

    def _row(self, rid: str) -> int:
        row = self.row_of.get(rid)
        if row is None:
            row = self.free.pop() if self.free else self.row_of.popitem(last=False)[1]
            self.reached_RD[row] = self.accepted_RD[row] = 0.0
            self.row_of[rid] = row
        else:
            self.row_of.move_to_end(rid)
        return row


class Cost(Protocol):
    def of(self, n_requests: int) -> np.ndarray: ...


class StepCost:
    """T(B, w) in seconds: measured at launch for some batch sizes, corrected by real steps.

    Real steps see what launch did not: the scheduler, longer contexts, a busy machine. That is much the same for every
    width, so a step corrects its whole batch size quickly, and its own width against the others slowly.
    """

    QUICK, SLOW = 1 / 8, 1 / 64

    def __init__(self, widths: Sequence[int], seconds: dict[int, Sequence[float]]) -> None:
        """`seconds[batch size]`, one per width."""
        self.widths = tuple(widths)
        self.sizes = np.array(sorted(seconds))
        self.launch_SW = np.array([seconds[size] for size in self.sizes])
        self.shift_S = np.zeros(len(self.sizes))
        self.own_SW = np.zeros_like(self.launch_SW)

    def of(self, n_requests: int) -> np.ndarray:
        """Seconds per step, one per width."""
        i, share = self._between(n_requests)
        seconds_SW = self.launch_SW + self.own_SW + self.shift_S[:, None]
        return seconds_SW[i] * (1 - share) + seconds_SW[i + 1 if share else i] * share

    def observe(self, n_requests: int, width: int, seconds: float) -> None:
        """A real step. One that took twice as long as expected was disturbed, and counts as twice as long."""
        w = self.widths.index(width)
        expected = self.of(n_requests)[w]
        error = min(seconds, 2 * expected) - expected
        i, share = self._between(n_requests)
        for size, weight in ((i, 1 - share), (i + 1, share)):
            if weight:
                self.shift_S[size] += self.QUICK * weight * error
                self.own_SW[size, w] += self.SLOW * weight * error

    def __str__(self) -> str:
        rows = [["", *map(str, self.widths)]]
        rows += [[str(size), *(f"{1e3 * s:.2f} ms" for s in self.of(size))] for size in self.sizes]
        return "\n".join("".join(f"{cell:>10}" for cell in row) for row in rows)

    def _between(self, n_requests: int) -> tuple[int, float]:
        """The measured size at or below, and how far towards the next; sizes outside are as far as measured."""
        i = int(np.searchsorted(self.sizes, n_requests, side="right")) - 1
        if i < 0:
            return 0, 0.0
        if i + 1 == len(self.sizes):
            return i, 0.0
        return i, float(n_requests - self.sizes[i]) / float(self.sizes[i + 1] - self.sizes[i])


class Adaptive:
    """The width with the most committed tokens per second."""

    def __init__(self, widths: Sequence[int], acceptance: Acceptance, cost: Cost) -> None:
        """`widths` ascending, the last one the block."""
        self.widths = np.array(widths)
        self.acceptance = acceptance
        self.cost = cost
        self.saved_s = 0.0  # what looking may cost

    def choose(self, rids: Sequence[str]) -> int:
        committed_W = self.acceptance.expected(rids)[self.widths - 1]
        seconds_W = self.cost.of(len(rids))
        rate_W = committed_W / seconds_W
        best = len(rate_W) - 1 - int(rate_W[::-1].argmax())  # of equals the widest, which learns most
        # What the widest step is slower than the best ones that commit as much.
        price_s = seconds_W[-1] - committed_W[-1] / rate_W[best]
        self.saved_s = min(self.saved_s + EXPLORE * seconds_W[best], seconds_W[-1])
        if self.saved_s < price_s:
            return int(self.widths[best])
        self.saved_s -= price_s
        return int(self.widths[-1])

    def observe(self, rids: Sequence[str], width: int, n_accepted_B: Sequence[int], seconds: float | None) -> None:
        """A step's outcome; `seconds` where they are known to be that step's own."""
        self.acceptance.observe(rids, width, n_accepted_B)
        if seconds is not None:
            self.cost.observe(len(rids), width, seconds)
