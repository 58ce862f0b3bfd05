"""The width policy at work on text that is drawn: what it chose, step by step, and what came of it.

Requests come and go, acceptances are random, and everything reaches the policy one step late, as in a server.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from launch.published import BLOCK, committed
from sglang_dflash.width.cost import StepCost
from sglang_dflash.width.policy import Acceptance, Adaptive, Decision

WIDTHS = (1, 2, 4, 6, 8, 12, 16)
ANSWER_TOKENS = 256, 4096  # lengths of answers, drawn evenly between
JITTER = 0.05  # standard deviation of a step's time over its expected time
NEAR = 0.02  # a width whose throughput is this near the best one's is right
SETTLED = 10  # steps in a row, all but one of them right, with which the policy has followed


class Text(NamedTuple):
    """What is generated: kinds of text, and which request is of which kind after how many tokens."""

    curves_KD: np.ndarray  # conditional acceptance by kind and position
    kind: Callable[[int, float], int] = lambda number, tokens: 0  # request, tokens so far per place in the batch

    def committed_KW(self) -> np.ndarray:
        return np.array([committed(curve_D)[np.array(WIDTHS) - 1] for curve_D in self.curves_KD])


class Replay(NamedTuple):
    """What the policy did, step by step, and what came of it."""

    widths: list[int]
    kinds: list[int]  # of the first request
    tokens_K: np.ndarray  # expected committed tokens, by kind
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return float(self.tokens_K.sum()) / self.seconds


def replay(
    text: Text, seconds_W: np.ndarray, believed: StepCost, n: int, *, ends: Callable[[int, float], bool], seed: int
) -> Replay:
    """`n` requests at a time until `ends(steps, tokens per place)`; the policy believes steps to cost `believed`."""
    random = np.random.default_rng(seed)
    chooser = Adaptive(WIDTHS, Acceptance(BLOCK - 1, 2 * n), believed)
    committed_KW = text.committed_KW()
    numbers, left_B, n_started = list(range(n)), random.integers(*ANSWER_TOKENS, n), n
    widths, kinds, tokens_K, seconds, drawn = [], [], np.zeros(len(committed_KW)), 0.0, 0
    late: tuple[list[str], Decision, np.ndarray, float] | None = None
    while not ends(len(widths), drawn / n):
        rids = [f"request-{number}" for number in numbers]
        decision = chooser.decide(rids)
        if late is not None:  # the step before arrives when this one is decided
            chooser.observe(*late[:3])
            believed.observe(n, late[1].width, late[3])
        width = decision.width
        w = WIDTHS.index(width)
        kinds_B = [text.kind(number, drawn / n) for number in numbers]
        is_accepted_BD = random.random((n, BLOCK - 1)) < text.curves_KD[kinds_B]
        n_accepted_B = is_accepted_BD[:, : width - 1].cumprod(axis=1).sum(axis=1)
        late = rids, decision, n_accepted_B, seconds_W[w] * np.exp(JITTER * random.standard_normal())
        np.add.at(tokens_K, kinds_B, committed_KW[kinds_B, w])
        widths.append(width)
        kinds.append(kinds_B[0])
        seconds += seconds_W[w]
        drawn += n + int(n_accepted_B.sum())
        left_B -= n_accepted_B + 1
        for place in np.flatnonzero(left_B <= 0):
            numbers[place], left_B[place] = n_started, random.integers(*ANSWER_TOKENS)
            n_started += 1
    return Replay(widths, kinds, tokens_K, seconds)


def static(text: Text, seconds_W: np.ndarray, n: int, tokens_K: np.ndarray) -> np.ndarray:
    """Tokens per second of every width for so many tokens of each kind."""
    steps_W = (tokens_K[:, None] / text.committed_KW()).sum(axis=0) / n
    return tokens_K.sum() / (steps_W * seconds_W)


def histogram(replays: Sequence[Replay]) -> dict[str, float]:
    """The share of steps by width."""
    count = Counter(width for replay in replays for width in replay.widths)
    return {str(width): round(count[width] / count.total(), 4) for width in WIDTHS if count[width]}


def pooled(replays: Sequence[Replay]) -> float:
    """Tokens per second over all of them."""
    return float(sum(replay.tokens_K.sum() for replay in replays) / sum(replay.seconds for replay in replays))


def followed(text: Text, seconds_W: np.ndarray, replay: Replay) -> list[int | None]:
    """Steps until the policy had followed the first request's kind of text: at the start, and after every change.

    None where it did not before the next change.
    """
    rate_KW = text.committed_KW() / seconds_W
    is_right_KW = rate_KW >= (1 - NEAR) * rate_KW.max(axis=1, keepdims=True)
    is_right = [is_right_KW[kind, WIDTHS.index(width)] for kind, width in zip(replay.kinds, replay.widths, strict=True)]
    changes = [step for step in range(1, len(is_right)) if replay.kinds[step] != replay.kinds[step - 1]]
    return [_settled(is_right[start:end]) for start, end in pairwise([0, *changes, len(is_right)])]


def _settled(is_right: Sequence[bool]) -> int | None:
    for step in range(len(is_right) - SETTLED + 1):
        if sum(is_right[step : step + SETTLED]) >= SETTLED - 1:
            return step
    return None
