"""One measured run: a set of prompts through one engine at one concurrency, and the numbers drawn from such runs.

A run is timed from the first request sent to the last answer received, so prefill counts. Two kinds of run exist:
unstreamed ones give tokens per second, streamed ones give the latencies (a stream costs its reader and the server some
work per step, which would tax the arm with the most steps).

Knows nothing of servers, models or workers.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import psutil

Prompt = TypeVar("Prompt")
Arm = TypeVar("Arm")
NAN = float("nan")
LEAST, TURNOVER = 4, 2  # prompts of a part of a run: at least, and per request in flight
EVERYTHING = slice(None)


class Steps(NamedTuple):
    """What the target's forwards after the prefill committed."""

    n: int  # verify steps, or decode steps without speculation
    n_accepted: int  # drafts accepted in those steps
    reached_D: tuple[int, ...] = ()  # how many steps accepted at least 1, 2, ... drafts; empty where not counted

    @property
    def committed_per_step(self) -> float:
        """Accepted drafts + 1 bonus, mean over steps."""
        return 1 + self.n_accepted / self.n if self.n else NAN

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of steps whose 1st, 2nd, ... draft was accepted."""
        return [reached / self.n for reached in self.reached_D]

    def since(self, earlier: "Steps") -> "Steps":
        reached_D = (now - earlier.reached_D[i] for i, now in enumerate(self.reached_D))
        return Steps(self.n - earlier.n, self.n_accepted - earlier.n_accepted, tuple(reached_D))


def total(steps: Iterable[Steps]) -> Steps:
    n, n_accepted, reached_D = 0, 0, list[int]()
    for one in steps:
        n, n_accepted = n + one.n, n_accepted + one.n_accepted
        reached_D += [0] * (len(one.reached_D) - len(reached_D))
        for position, reached in enumerate(one.reached_D):
            reached_D[position] += reached
    return Steps(n, n_accepted, tuple(reached_D))


class Answer(NamedTuple):
    n_tokens: int
    token_ids: tuple[int, ...] = ()  # empty where the server does not tell them
    text: str = ""
    steps: Steps | None = None  # None where the server does not count them
    n_prompt_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()  # empty where the server does not tell them
    ttft_s: float = NAN  # time to first token; nan when unstreamed
    tpot_s: float = NAN  # time per output token after the first; nan when unstreamed or when there is no second token


class Run(NamedTuple):
    answers: list[Answer]
    wall_s: float
    other_cores: float  # cores that neither this engine nor this client kept busy: noise; nan where it cannot be told
    counted: Steps | None = None  # of engines that count steps for all requests together

    @property
    def n_tokens(self) -> int:
        return sum(answer.n_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.wall_s

    @property
    def steps(self) -> Steps | None:
        told = [answer.steps for answer in self.answers if answer.steps is not None]
        return self.counted or (total(told) if len(told) == len(self.answers) else None)

    @property
    def committed_per_step(self) -> float:
        return self.steps.committed_per_step if self.steps else NAN


def joined(runs: Sequence[Run]) -> Run:
    """One after the other."""
    wall_s = sum(run.wall_s for run in runs)
    other_s = sum(run.other_cores * run.wall_s for run in runs)
    counted = [run.counted for run in runs if run.counted is not None]
    answers = [answer for run in runs for answer in run.answers]
    return Run(answers, wall_s, other_s / wall_s, total(counted) if counted else None)


def slices(n_prompts: int, concurrency: int) -> list[slice]:
    """Parts of a run, as short as its first and last requests, which have fewer beside them, allow.

    A machine that others use too changes its speed within seconds. Arms that take turns after every part meet the
    same machine.
    """
    size = max(LEAST, TURNOVER * concurrency)
    return [slice(start, start + size) for start in range(0, n_prompts, size)]


def rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    """The same arms, beginning `by` places later, so that no arm is always first."""
    first = by % len(arms)
    return [*arms[first:], *arms[:first]]


class Spread(NamedTuple):
    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Pairwise, repeat by repeat: what slows both arms of a repeat cancels."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of `values` do not exceed (nearest rank); nan of nothing."""
    ordered = sorted(value for value in values if value == value)
    if not ordered:
        return NAN
    rank = -(-len(ordered) * percent // 100)  # ceiling
    return ordered[max(int(rank), 1) - 1]


def timed(
    ask: Callable[[Prompt], Callable[[], Answer]],
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    processes: Callable[[], Iterable[psutil.Process]] | None,
) -> Run:
    """Ask every prompt, at most `concurrency` at a time.

    Args:
        ask: returns when the answer has come; what it returns reads the answer, after the clock has stopped.
        processes: those of the engine; None where they are not on this machine or not known.
    """
    before, began = _busy(processes), time.perf_counter()
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        came = list(pool.map(ask, prompts))
    wall_s = time.perf_counter() - began
    after = _busy(processes)
    outside_s = (after.machine_s - before.machine_s) - (after.ours_s - before.ours_s)
    return Run([read() for read in came], wall_s, max(outside_s, 0.0) / wall_s if processes else NAN)


class _Busy(NamedTuple):
    machine_s: float  # CPU seconds of every process on the machine
    ours_s: float  # of the engine's processes and of this one


def _busy(processes: Callable[[], Iterable[psutil.Process]] | None) -> _Busy:
    machine = psutil.cpu_times()
    group = [process.cpu_times() for process in [*(processes() if processes else ()), psutil.Process()]]
    return _Busy(
        machine.user + machine.nice + machine.system + machine.irq + machine.softirq + machine.steal,
        sum(times.user + times.system for times in group),
    )
