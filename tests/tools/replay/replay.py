"""Replays of recorded answers: serve them at steady load with given widths, and compute tokens per second."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, cycle
from typing import NamedTuple, Self

from sglang_dflash.engine.width.chooser import Chooser
from sglang_dflash.engine.width.cost import StepCost
from sglang_dflash.engine.width.policy import Adaptive, Fixed, Policy
from tests.tools.replay.record import DIGITS, TRACES
from tests.tools.replay.times import Machine

N_STEPS, WARM_UP = 3000, 300  # steps of a replay; the first ones are not counted
CHANGE, SHORT = 700, 48  # steps of each text if texts change, and largest number of tokens of an answer then

Answer = tuple[int, ...]  # number of drafts that would be accepted at each token


class Traffic(NamedTuple):
    """Answers by set, and the set of each request that runs at a time."""

    answers: Mapping[str, Sequence[Answer]]
    mix: Sequence[str]

    @property
    def block(self) -> int:
        """Return the largest useful width."""
        return 1 + max(max(answer) for name in set(self.mix) for answer in self.answers[name])

    def short(self) -> Self:
        """Return the same traffic with answers of at most `SHORT` tokens."""
        cut = {name: [answer[:SHORT] for answer in answers] for name, answers in self.answers.items()}
        return self._replace(answers=cut)


class Result(NamedTuple):
    """Tokens per second of a replay, in all and by set, and the share of steps at each width."""

    rate: float
    by_set: dict[str, float]
    widths: dict[int, float]


@dataclass
class Request:
    """A running request; `n_tokens` are committed."""

    name: str  # of its set
    rid: str
    answer: Answer
    n_tokens: int = 0

    def commit(self, width: int) -> int:
        """Run a step at `width`. Return the number of accepted drafts."""
        n_accepted = min(self.answer[self.n_tokens], width - 1)
        self.n_tokens += n_accepted + 1
        return n_accepted


class Load:
    """Steady load: as soon as a request ends, another one of its set follows."""

    def __init__(self, traffic: Traffic, numbers: Iterator[int]) -> None:
        """`numbers`: numbers of the requests."""
        self.numbers = numbers
        self.coming = {name: cycle(traffic.answers[name]) for name in traffic.mix}
        self.requests = [self.next(name) for name in traffic.mix]
        for i, request in enumerate(self.requests):  # the first ones end one after another
            request.n_tokens = i * len(request.answer) // len(self.requests)

    def next(self, name: str) -> Request:
        return Request(name, f"request {next(self.numbers)}", next(self.coming[name]))

    def step(self, widths: Sequence[int]) -> list[int]:
        """Run a step with a width for each request. Return the numbers of accepted drafts."""
        accepted = [request.commit(width) for request, width in zip(self.requests, widths, strict=True)]
        ended = [request.n_tokens >= len(request.answer) for request in self.requests]
        self.requests = [
            self.next(one.name) if has_ended else one for one, has_ended in zip(self.requests, ended, strict=True)
        ]
        return accepted


Widths = Callable[[Sequence[Request]], Sequence[int]]  # returns the widths of a step
Observe = Callable[[Sequence[int], float], None]  # receives the accepted drafts of a step, and the clock in seconds


def traces() -> dict[str, dict[str, list[Answer]]]:
    """Return the recorded answers by pair and set."""
    recorded = json.loads(TRACES.read_text())
    return {
        pair: {name: [tuple(map(DIGITS.index, answer)) for answer in answers] for name, answers in sets.items()}
        for pair, sets in recorded.items()
    }


def replay(
    traffic: Traffic,
    machine: Machine,
    widths: Widths,
    observe: Observe = lambda accepted, now: None,
    *,
    n_steps: int = N_STEPS,
    warm_up: int = WARM_UP,
    numbers: Iterator[int] | None = None,
) -> Result:
    """Serve `traffic`, with `widths` chosen in each step.

    Args:
        n_steps, warm_up: number of steps, and number of first steps that are not counted.
        numbers: numbers of the requests; None: from 0 on.
    """
    load, now, counted_s = Load(traffic, numbers or count()), 0.0, 0.0
    used, tokens = Counter[int](), Counter[str]()
    for i in range(n_steps):
        chosen, names = widths(load.requests), [request.name for request in load.requests]
        seconds = machine.step((len(chosen), sum(chosen), sum(width > 1 for width in chosen))) / 1000
        accepted = load.step(chosen)
        now += seconds
        observe(accepted, now)
        if i >= warm_up:
            counted_s += seconds
            used.update(chosen)
            for name, n in zip(names, accepted, strict=True):
                tokens[name] += n + 1
    by_set = {name: n / counted_s for name, n in tokens.items()}
    return Result(sum(by_set.values()), by_set, {w: n / used.total() for w, n in sorted(used.items())})


def with_policy(traffic: Traffic, machine: Machine, policy: Policy) -> Result:
    """Replay a policy, whose outcomes arrive as late as on the machine."""
    return replay(traffic, machine, *chosen_by(policy, machine))


def after(earlier: Traffic, traffic: Traffic, machine: Machine, policy: Policy) -> Result:
    """Replay a policy over `earlier` first. Return the result of `traffic`, without a warm-up."""
    chosen, numbers = chosen_by(policy, machine), count()
    replay(earlier, machine, *chosen, n_steps=CHANGE, numbers=numbers)
    return replay(traffic, machine, *chosen, n_steps=CHANGE, warm_up=0, numbers=numbers)


def chosen_by(policy: Policy, machine: Machine) -> tuple[Widths, Observe]:
    """Return the functions with which `replay` asks the policy, and reports the outcomes of steps.

    A step with a new request counts as one after a prompt.
    """
    chooser, outcomes, seen = Chooser(policy), list[tuple[Sequence[int], float]](), set[str]()

    def widths(requests: Sequence[Request]) -> Sequence[int]:
        rids = [request.rid for request in requests]
        if not seen.issuperset(rids):
            chooser.interrupt()
            seen.update(rids)
        return [chooser.decide(rids)] * len(requests)

    def observe(accepted: Sequence[int], now: float) -> None:
        outcomes.append((accepted, now))
        if len(outcomes) > machine.is_late:
            chooser.observe(*outcomes.pop(0))

    return widths, observe


def adaptive(machine: Machine, n_requests: int, widths: Sequence[int]) -> Policy:
    """Return the server's policy, with the machine's times as those of start-up."""
    sizes = {2**i for i in range(n_requests.bit_length())} | {n_requests}
    seconds = {size: [machine.uniform(size, width) / 1000 for width in widths] for size in sizes}
    return Adaptive(widths, StepCost(widths, seconds, lambda array: None))


def best_fixed(traffic: Traffic, machine: Machine, widths: Sequence[int]) -> tuple[int, Result]:
    """Return the fixed width with the highest rate, and its result."""
    results = {width: with_policy(traffic, machine, Fixed(width)) for width in widths}
    return max(results.items(), key=lambda item: item[1].rate)


def uniform(traffic: Traffic, machine: Machine, widths: Sequence[int]) -> Result:
    """Replay the best width for all requests of each step, if each answer's acceptance was known before."""

    def best(requests: Sequence[Request]) -> Sequence[int]:
        committed = {width: sum(1 + sum(survival(one.answer, width - 1)) for one in requests) for width in widths}
        width = max(widths, key=lambda width: committed[width] / machine.uniform(len(requests), width))
        return [width] * len(requests)

    return replay(traffic, machine, best)


def ragged(traffic: Traffic, machine: Machine, widths: Sequence[int]) -> Result:
    """Replay the best width of each request, up to the last of `widths`, with the same knowledge as `uniform`."""

    def best(requests: Sequence[Request]) -> Sequence[int]:
        # Drafts of all requests, the likeliest first. A request's drafts become less likely from slot to slot.
        drafts = sorted(
            ((p, i) for i, one in enumerate(requests) for p in survival(one.answer, widths[-1] - 1)), reverse=True
        )
        n, drafted, tokens = len(requests), set[int](), float(len(requests))
        most, n_taken = n / machine.step((n, n, 0)), 0
        for n_drafts, (p, i) in enumerate(drafts, start=1):
            drafted.add(i)
            tokens += p
            rate = tokens / machine.step((n, n + n_drafts, len(drafted)))
            if rate > most:
                most, n_taken = rate, n_drafts
        taken = Counter(i for _, i in drafts[:n_taken])
        return [1 + taken[i] for i in range(n)]

    return replay(traffic, machine, best)


@cache
def survival(answer: Answer, n_drafts: int) -> Sequence[float]:
    """Return the share of the answer's tokens at which the first 1, 2, ... drafts are accepted."""
    return [sum(n >= i for n in answer) / len(answer) for i in range(1, n_drafts + 1)]
