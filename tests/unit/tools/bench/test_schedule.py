"""Benchmark schedule: the order of the arms' turns, unmeasured prompts, and the steps counted for a turn.

A turn is one arm's requests for one part of the prompts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sglang_dflash.pairs.tiny.workloads import asked
from sglang_dflash.tools.bench.compare import Difference
from sglang_dflash.tools.bench.engine import Prompt, Sampling
from sglang_dflash.tools.bench.measure import Completion, Steps
from sglang_dflash.tools.bench.prompts import Task
from sglang_dflash.tools.bench.schedule import Bench, Schedule, turns


def test_arms_take_turns() -> None:
    schedule = Schedule(concurrency=[1], repeats=2, together=True, short_turns=True, latency=True)
    first, then = (
        [(turn.arm, turn.part.start, turn.stream) for turn in turns(schedule, repeat, n_prompts=[8], n_arms=2)]
        for repeat in (0, 1)
    )
    assert first == [(arm, at, stream) for arm, at in ((0, 0), (1, 0), (1, 4), (0, 4)) for stream in (False, True)]
    assert then == [(1, 0, False), (0, 0, False), (0, 4, False), (1, 4, False)]


def test_arms_run_one_at_a_time_start_once_per_repeat() -> None:
    schedule = Schedule(concurrency=[1, 8], repeats=2, together=False, short_turns=True, latency=False)
    order = [(turn.arm, turn.task, turn.concurrency) for turn in turns(schedule, 1, n_prompts=[8, 8], n_arms=2)]
    places = [(task, concurrency) for task in (0, 1) for concurrency in (1, 8)]
    assert order == [(arm, *place) for arm in (1, 0) for place in places]


class StandIn:
    """In-process engine. Each answer takes one step, which accepts one draft more than the last answer: 0, 1, 2, ..."""

    kind, processes, token = "stand-in", None, 7

    def __init__(self) -> None:
        self.name, self.n_asked = "stand-in", list[int]()  # number of requests between flushes

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def flush(self) -> bool:
        self.n_asked.append(0)
        return True

    def ask(self, prompt: Prompt, sampling: Sampling, *, stream: bool) -> Callable[[], Completion]:
        self.n_asked[-1] += 1
        return lambda: Completion(1, token_ids=(self.token,))

    def likeliest(self, context: Sequence[int]) -> dict[int, float]:
        return {}

    def counted(self) -> Steps:
        n = sum(self.n_asked)
        return Steps(n, sum(range(n)))

    def widths(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"url": "here"}


def bench_of(n_prompts: int, concurrency: Sequence[int], *, together: bool = True) -> tuple[StandIn, Bench]:
    schedule = Schedule(concurrency=concurrency, repeats=2, together=together, short_turns=together, latency=False)
    task, sampling = Task("t", "", [asked(str(i)) for i in range(n_prompts)]), Sampling(max_new_tokens=1)
    engine = StandIn()
    return engine, Bench([engine], [task], schedule, sampling, answered=lambda turn, engine: None)


def test_each_turn_begins_with_unmeasured_prompts() -> None:
    """A turn flushes the prefix cache, sends unmeasured prompts, flushes again and sends its measured prompts.

    Two prompts are unmeasured, except in the first turn at concurrency 3, which has three. At concurrency 1 the six
    measured prompts are two turns, of 4 and 2 prompts. At concurrency 3 they are one turn.
    """
    engine, bench = bench_of(6, [1, 3])
    bench.repeat(0)
    assert engine.n_asked == [2, 4, 2, 2, 3, 6]
    bench.repeat(1)
    assert engine.n_asked[6:] == [2, 4, 2, 2, 2, 6]


def test_a_restarted_arm_is_warmed_up_again() -> None:
    engine, bench = bench_of(6, [1, 3], together=False)
    for repeat in (0, 1):
        bench.repeat(repeat)
        assert engine.n_asked[4 * repeat :] == [2, 6, 3, 6]


def test_a_difference_names_its_unit() -> None:
    assert str(Difference(0, 2, 7, None)) == "prompt 1, token 3: expected 7, found the end"
    assert str(Difference(0, 2, "a", None)) == "prompt 1, character 3: expected 'a', found the end"


def test_steps_exclude_unmeasured_prompts() -> None:
    """The two unmeasured prompts accept 0 and 1 drafts. The four measured ones accept 2, 3, 4 and 5, in sum 14."""
    _, bench = bench_of(4, [1])
    (row,) = bench.repeat(0)
    assert row.committed_per_step == 1 + 14 / 4


def test_answers_at_steady_load_are_compared_by_prompt() -> None:
    """Before the first turn the first engine answers each prompt once. Later answers are compared with these."""
    engine, bench = bench_of(4, [1])
    bench.schedule = replace(bench.schedule, steady_s=0.01)
    assert bench.n_asked() is None
    (row,) = bench.repeat(0)
    assert (engine.n_asked[0], len(engine.n_asked)) == (4, 2), "the reference, then the turn, without a warm-up"
    assert row.n_equal == row.n_answers > 4
    engine.token = 8
    (row,) = bench.repeat(1)
    assert (row.n_equal, row.first_differences[0]) == (0, "prompt 2, token 1: expected 7, found 8")


def test_answers_are_compared_with_the_first_repeat() -> None:
    """Later repeats of the first arm are compared with its own first repeat."""
    engine, bench = bench_of(4, [1])
    (row,) = bench.repeat(0)
    assert (row.n_equal, row.first_differences) == (4, [])
    engine.token = 8
    (row,) = bench.repeat(1)
    assert (row.n_equal, row.first_differences[0]) == (0, "prompt 1, token 1: expected 7, found 8")
