"""Measured run: a set of prompts through one engine at one concurrency, and statistics of runs.

A run's time is from the first request sent to the last answer received, including prefill. At its end fewer requests
are in flight. A run at steady load has no such end: a new request follows each answer, and only a window of fixed
length is measured. Unstreamed runs measure tokens per second, streamed runs latencies. Streaming costs client and
server time per step, so it would penalise the arm with the most steps.

This module does not depend on servers, models or workers.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count, zip_longest
from threading import Lock
from typing import NamedTuple, TypeVar

import psutil

Prompt = TypeVar("Prompt")
Arm = TypeVar("Arm")
NAN = float("nan")
LEAST, TURNOVER = 4, 2  # a part of a run has at most max(LEAST, TURNOVER * concurrency) prompts
EVERYTHING = slice(None)


class Steps(NamedTuple):
    """Counts of decode steps, without the prefill."""

    n: int  # number of verify steps; without speculation, of steps with one token each
    n_accepted: int  # number of drafts accepted in all steps
    reached_D: tuple[int, ...] = ()  # numbers of steps that accepted at least 1, 2, ... drafts; empty if not counted

    @property
    def committed_per_step(self) -> float:
        """Return the acceptance length: accepted drafts plus 1 bonus, mean over steps."""
        return 1 + self.n_accepted / self.n if self.n else NAN

    @property
    def acceptance_by_position(self) -> list[float]:
        """Return the shares of steps whose 1st, 2nd, ... draft was accepted. Return no shares without steps."""
        return [reached / self.n for reached in self.reached_D] if self.n else []

    def since(self, earlier: "Steps") -> "Steps":
        reached_D = (now - earlier.reached_D[i] for i, now in enumerate(self.reached_D))
        return Steps(self.n - earlier.n, self.n_accepted - earlier.n_accepted, tuple(reached_D))


def total(steps: Iterable[Steps]) -> Steps:
    every = list(steps)
    reached_D = map(sum, zip_longest(*(one.reached_D for one in every), fillvalue=0))
    return Steps(sum(one.n for one in every), sum(one.n_accepted for one in every), tuple(reached_D))


class Completion(NamedTuple):
    """Answer to one request, with its counts and times."""

    n_tokens: int
    token_ids: tuple[int, ...] = ()  # empty if the server does not return them
    text: str = ""
    steps: Steps | None = None  # None if the server does not count them
    n_prompt_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()  # empty if the server does not return them
    ttft_s: float = NAN  # time to first token; nan if unknown, as in an unstreamed answer of a server
    tpot_s: float = NAN  # time per output token after the first; nan if unknown, or without a second token


class Measurement(NamedTuple):
    """Results of a set of prompts through one engine at one concurrency."""

    completions: list[Completion]
    wall_s: float
    other_cores: float  # cores used by processes other than engine and client (noise); nan if unknown
    counted: Steps | None = None  # steps of all requests, if the engine counts steps only in total
    # At steady load, for each completion: index of its prompt, and fraction of its time inside the measured window.
    prompts: tuple[int, ...] = ()
    within: tuple[float, ...] = ()

    @property
    def n_tokens(self) -> int:
        if self.within:  # a request generates its tokens evenly, apart from its prefill
            return round(sum(share * one.n_tokens for share, one in zip(self.within, self.completions, strict=True)))
        return sum(one.n_tokens for one in self.completions)

    @property
    def n_whole(self) -> int:
        """Return the number of requests that began and ended inside the measurement."""
        return sum(share == 1 for share in self.within) if self.within else len(self.completions)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.wall_s

    @property
    def steps(self) -> Steps | None:
        """Return the steps of all requests; None unless all are counted."""
        steps = [one.steps for one in self.completions if one.steps is not None]
        return self.counted or (total(steps) if len(steps) == len(self.completions) else None)


def joined(runs: Sequence[Measurement]) -> Measurement:
    """Join successive runs into one. A run at steady load stays alone."""
    if len(runs) == 1:
        return runs[0]
    wall_s = sum(run.wall_s for run in runs)
    other_s = sum(run.other_cores * run.wall_s for run in runs)
    counted = [run.counted for run in runs if run.counted is not None]
    completions = [one for run in runs for one in run.completions]
    return Measurement(completions, wall_s, other_s / wall_s, total(counted) if counted else None)


def slices(n_prompts: int, concurrency: int) -> list[slice]:
    """Split the prompts of a run into parts. Every arm answers a part before the next part begins.

    Parts are short, because the machine's speed may change within seconds. They are long enough that the end of a part,
    where fewer than `concurrency` requests are in flight, has little weight.
    """
    size = max(LEAST, TURNOVER * concurrency)
    return [slice(start, start + size) for start in range(0, n_prompts, size)]


def rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    """Return the arms rotated by `by` positions, so that no arm is always first."""
    first = by % len(arms)
    return [*arms[first:], *arms[:first]]


class Spread(NamedTuple):
    """Median, minimum and maximum of repeated measurements."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the spread of the ratio ours / theirs over repeats. A slowdown of both arms in a repeat cancels."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of `values` that is at least as large as `percent` % of them (nearest rank); nan if empty."""
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
    """Send every prompt, at most `concurrency` at a time, and measure the run.

    Args:
        ask: sends a prompt and waits for the answer. Returns a function that parses the answer. This function is
            called after the clock has stopped.
        processes: lists the engine's processes; None if they are remote or unknown.
    """
    before, began = _busy(processes), time.perf_counter()
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        came = list(pool.map(ask, prompts))
    wall_s = time.perf_counter() - began
    outside_s = _busy(processes).outside_s(before)
    return Measurement([read() for read in came], wall_s, outside_s / wall_s if processes else NAN)


class Asked(NamedTuple):
    """An answered request of a steady load; times in seconds of `time.perf_counter`."""

    prompt: int  # index
    began_s: float
    ended_s: float
    read: Callable[[], Completion]

    def within(self, begin_s: float, end_s: float) -> float:
        """Return the fraction of the request's time inside a window."""
        inside_s = min(self.ended_s, end_s) - max(self.began_s, begin_s)
        return max(inside_s, 0.0) / (self.ended_s - self.began_s)


class Load:
    """Numbers of the requests of a steady load, and its measured window. Several threads use it."""

    def __init__(self, concurrency: int, seconds: float) -> None:
        self.n_running, self.seconds = concurrency, seconds
        self.numbers, self.lock = count(), Lock()
        self.begin_s = self.end_s = float("inf")

    def next(self) -> int | None:
        """Return the number of the next request; None: the window has ended."""
        with self.lock:
            return None if time.perf_counter() >= self.end_s else next(self.numbers)

    def first_ended(self) -> None:
        """Note that a thread's first request has ended. The last such call begins the window."""
        with self.lock:
            self.n_running -= 1
            if not self.n_running:
                self.begin_s = time.perf_counter()
                self.end_s = self.begin_s + self.seconds

    def stop(self) -> None:
        with self.lock:
            self.end_s = min(self.end_s, time.perf_counter())


def steady(
    ask: Callable[[Prompt], Callable[[], Completion]],
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    seconds: float,
    processes: Callable[[], Iterable[psutil.Process]] | None,
) -> Measurement:
    """Keep `concurrency` requests in flight, and measure a window of `seconds`. The other arguments are `timed`'s.

    The prompts are sent in order, again and again. The window begins when the first `concurrency` requests have ended,
    because they began together. Requests that are in flight at its end are awaited.
    """
    load = Load(concurrency, seconds)

    def loop(_: int) -> list[Asked]:
        asked = list[Asked]()
        try:
            while (number := load.next()) is not None:
                began_s, prompt = time.perf_counter(), number % len(prompts)
                read = ask(prompts[prompt])
                asked.append(Asked(prompt, began_s, time.perf_counter(), read))
                if len(asked) == 1:
                    load.first_ended()
        finally:
            load.stop()  # an error of one thread ends the load
        return asked

    before, began_s = _busy(processes), time.perf_counter()
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        came = [one for asked in pool.map(loop, range(concurrency)) for one in asked]
    wall_s = time.perf_counter() - began_s
    outside_s = _busy(processes).outside_s(before)
    measured = [one for one in came if one.within(load.begin_s, load.end_s)]
    return Measurement(
        [one.read() for one in measured],
        load.end_s - load.begin_s,
        outside_s / wall_s if processes else NAN,
        prompts=tuple(one.prompt for one in measured),
        within=tuple(one.within(load.begin_s, load.end_s) for one in measured),
    )


class Busy(NamedTuple):
    """CPU seconds until now: of all processes on the machine, and of the engine and this process by process id."""

    machine_s: float
    own_s: dict[int, float]

    def outside_s(self, before: "Busy") -> float:
        """Return the CPU seconds of other processes since `before`, at least 0.

        A process of the engine that began after `before` counts from its start. If a process of the engine has ended,
        its time since `before` is unknown, and counts as time of other processes.
        """
        own_s = sum(now_s - before.own_s.get(pid, 0.0) for pid, now_s in self.own_s.items())
        return max(self.machine_s - before.machine_s - own_s, 0.0)


def _busy(processes: Callable[[], Iterable[psutil.Process]] | None) -> Busy:
    machine = psutil.cpu_times()
    own_s = dict[int, float]()
    for process in [*(processes() if processes else ()), psutil.Process()]:
        with suppress(psutil.NoSuchProcess):  # a child of the engine has ended since it was listed
            times = process.cpu_times()
            own_s[process.pid] = times.user + times.system
    busy_s = machine.user + machine.nice + machine.system + machine.irq + machine.softirq + machine.steal
    return Busy(busy_s, own_s)
