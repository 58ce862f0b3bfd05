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
from itertools import zip_longest
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
    every = list(steps)
    reached_D = map(sum, zip_longest(*(one.reached_D for one in every), fillvalue=0))
    return Steps(sum(one.n for one in every), sum(one.n_accepted for one in every), tuple(reached_D))


class Completion(NamedTuple):
    """The answer to one request, with its counts and times."""

    n_tokens: int
    token_ids: tuple[int, ...] = ()  # empty where the server does not tell them
    text: str = ""
    steps: Steps | None = None  # None where the server does not count them
    n_prompt_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()  # empty where the server does not tell them
    ttft_s: float = NAN  # time to first token; nan when unstreamed
    tpot_s: float = NAN  # time per output token after the first; nan when unstreamed or when there is no second token


class Measurement(NamedTuple):
    """A set of prompts through one engine at one concurrency."""

    completions: list[Completion]
    wall_s: float
    other_cores: float  # cores that neither this engine nor this client kept busy: noise; nan where it cannot be told
    counted: Steps | None = None  # of engines that count steps for all requests together

    @property
    def n_tokens(self) -> int:
        return sum(one.n_tokens for one in self.completions)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.wall_s

    @property
    def steps(self) -> Steps | None:
        """Return the steps of all requests; None unless all are counted."""
        told = [one.steps for one in self.completions if one.steps is not None]
        return self.counted or (total(told) if len(told) == len(self.completions) else None)


def joined(runs: Sequence[Measurement]) -> Measurement:
    """Return successive runs as one."""
    wall_s = sum(run.wall_s for run in runs)
    other_s = sum(run.other_cores * run.wall_s for run in runs)
    counted = [run.counted for run in runs if run.counted is not None]
    completions = [one for run in runs for one in run.completions]
    return Measurement(completions, wall_s, other_s / wall_s, total(counted) if counted else None)


def slices(n_prompts: int, concurrency: int) -> list[slice]:
    """Return the parts of a run. The machine may change its speed within seconds, so parts are short.

    They are long enough for their first and last requests, which have fewer beside them, to weigh little.
    """
    size = max(LEAST, TURNOVER * concurrency)
    return [slice(start, start + size) for start in range(0, n_prompts, size)]


def rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    """Return the arms, beginning `by` places later, so that no arm is always first."""
    first = by % len(arms)
    return [*arms[first:], *arms[:first]]


class Spread(NamedTuple):
    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Divide repeat by repeat: what slows both arms of a repeat cancels."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of `values` do not exceed (nearest rank); nan without values."""
    ordered = sorted(value for value in values if value == value)
    if not ordered:
        return NAN
    rank = -(-len(ordered) * percent // 100)  # ceiling
    return ordered[max(int(rank), 1) - 1]


def timed(
    ask: Callable[[Prompt], Callable[[], Completion]],
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    processes: Callable[[], Iterable[psutil.Process]] | None,
) -> Measurement:
    """Ask every prompt, at most `concurrency` at a time.

    Args:
        ask: waits for the answer, and returns a function that reads it after the clock has stopped.
        processes: lists the engine's processes; None where they are not on this machine or not known.
    """
    (machine_s, ours_s), began = _busy(processes), time.perf_counter()
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        came = list(pool.map(ask, prompts))
    wall_s = time.perf_counter() - began
    machine_after_s, ours_after_s = _busy(processes)
    outside_s = (machine_after_s - machine_s) - (ours_after_s - ours_s)
    return Measurement([read() for read in came], wall_s, max(outside_s, 0.0) / wall_s if processes else NAN)


def _busy(processes: Callable[[], Iterable[psutil.Process]] | None) -> tuple[float, float]:
    """Return CPU seconds of every process on the machine, and of the engine's processes and this one."""
    machine = psutil.cpu_times()
    group = [process.cpu_times() for process in [*(processes() if processes else ()), psutil.Process()]]
    busy_s = machine.user + machine.nice + machine.system + machine.irq + machine.softirq + machine.steal
    return busy_s, sum(times.user + times.system for times in group)
