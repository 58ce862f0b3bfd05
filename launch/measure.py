"""One measured run: a set of prompts through one server at one concurrency, and the numbers drawn from such runs.

A run is timed from the first request sent to the last answer received, so prefill counts. Two kinds of run exist:
unstreamed ones give tokens per second, streamed ones give the latencies (a stream costs its reader and the server some
work per step, which would tax the arm with the most steps).

Knows servers only through HTTP, and nothing of models or workers.
"""

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import psutil

from launch.server import REQUEST_TIMEOUT_S, Server, ServerError

LEAST, TURNOVER = 4, 2  # prompts of a part of a run: at least, and per request in flight


class Answer(NamedTuple):
    token_ids: tuple[int, ...]
    n_steps: int  # verify steps, or decode steps without speculation
    n_accepted: int  # drafts accepted in those steps
    ttft_s: float  # time to first token; nan when unstreamed
    tpot_s: float  # time per output token after the first; nan when unstreamed or when there is no second token


class Run(NamedTuple):
    answers: list[Answer]
    wall_s: float
    other_cores: float  # cores that neither this server nor this client kept busy: noise from outside

    @property
    def n_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.wall_s

    @property
    def committed_per_step(self) -> float:
        """Accepted drafts + 1 bonus, mean over steps."""
        n_steps = sum(answer.n_steps for answer in self.answers)
        return 1 + sum(answer.n_accepted for answer in self.answers) / n_steps if n_steps else float("nan")


def joined(runs: Sequence[Run]) -> Run:
    """One after the other."""
    wall_s = sum(run.wall_s for run in runs)
    other_s = sum(run.other_cores * run.wall_s for run in runs)
    return Run([answer for run in runs for answer in run.answers], wall_s, other_s / wall_s)


def slices(n_prompts: int, concurrency: int) -> list[slice]:
    """Parts of a run, as short as its first and last requests, which have fewer beside them, allow.

    A machine that others use too changes its speed within seconds. Arms that take turns after every part meet the
    same machine.
    """
    size = max(LEAST, TURNOVER * concurrency)
    return [slice(start, start + size) for start in range(0, n_prompts, size)]


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
        return float("nan")
    rank = -(-len(ordered) * percent // 100)  # ceiling
    return ordered[max(int(rank), 1) - 1]


def run(
    server: Server, prompts: Sequence[list[int]], *, concurrency: int, stream: bool = False, **sampling: Any
) -> Run:
    """Send every prompt, at most `concurrency` in flight, greedy; `sampling` is SGLang's (`max_new_tokens=128`, ...).

    The prefix cache is flushed first, so every prompt is computed in every run.
    """
    server.flush_cache()
    ask = _streamed if stream else _unstreamed
    with httpx.Client(base_url=server.url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as http:
        before, began = _busy(server), time.perf_counter()
        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            greedy = {"temperature": 0.0} | sampling
            bodies = ({"input_ids": prompt, "sampling_params": greedy, "stream": stream} for prompt in prompts)
            answers = list(pool.map(lambda body: ask(http, body), bodies))
        wall_s = time.perf_counter() - began
        after = _busy(server)
    outside_s = (after.machine_s - before.machine_s) - (after.ours_s - before.ours_s)
    return Run(answers, wall_s, max(outside_s, 0.0) / wall_s)


def _unstreamed(http: httpx.Client, body: dict[str, Any]) -> Answer:
    response = http.post("/generate", json=body)
    if response.status_code != 200:
        raise ServerError(f"/generate answered {response.status_code}: {response.text[:500]}")
    return _answer(response.json(), float("nan"), float("nan"))


def _streamed(http: httpx.Client, body: dict[str, Any]) -> Answer:
    # Only the last event is parsed: each carries the whole answer so far, and reading them all would be timed.
    sent, first, last, event = time.perf_counter(), 0.0, 0.0, ""
    with http.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            raise ServerError(f"/generate answered {response.status_code}: {response.read()[:500]!r}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                last = time.perf_counter()
                first, event = first or last, line
    if not event:
        raise ServerError("/generate streamed no event; look at the server's log")
    result = json.loads(event.removeprefix("data: "))
    n_later = len(result["output_ids"]) - 1
    return _answer(result, first - sent, (last - first) / n_later if n_later else float("nan"))


def _answer(result: dict[str, Any], ttft_s: float, tpot_s: float) -> Answer:
    meta = result["meta_info"]
    # Without speculation SGLang reports no counters: each token after the prefill's is a step of its own. With it, an
    # answer that ended with the prefill's token has none either, and no step.
    n_steps = meta.get("spec_verify_ct", len(result["output_ids"]) - 1)
    return Answer(tuple(result["output_ids"]), n_steps, meta.get("spec_num_correct_drafts", 0), ttft_s, tpot_s)


class _Busy(NamedTuple):
    machine_s: float  # CPU seconds of every process on the machine
    ours_s: float  # of the server's group and of this process


def _busy(server: Server) -> _Busy:
    total = psutil.cpu_times()
    groups = [process.cpu_times() for process in [*server.processes(), psutil.Process()]]
    return _Busy(
        total.user + total.nice + total.system + total.irq + total.softirq + total.steal,
        sum(times.user + times.system for times in groups),
    )
