"""Schedule of the arms, which take turns in a rotating order.

If all arms are in memory, the arms change after every part of the prompts. Otherwise an arm answers all prompts at
every concurrency before the next arm starts. A turn is one arm's requests for one part. Each turn begins with a
warm-up. Before the warm-up and before the measurement the prefix cache is emptied, if the engine has a way to do this.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.tools.bench.compare import Difference, Unequal, differences, require_equal
from sglang_dflash.tools.bench.engine import Engine, Prompt, Sampling
from sglang_dflash.tools.bench.measure import (
    EVERYTHING,
    Completion,
    Measurement,
    joined,
    rotated,
    slices,
    steady,
    timed,
)
from sglang_dflash.tools.bench.prompts import Task
from sglang_dflash.tools.bench.rows import Row, row

# Number of unmeasured prompts before each turn. Before an arm's first turn at a concurrency the number is raised to
# that concurrency.
N_WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Extent of the measurement.

    Attributes:
        concurrency: numbers of requests in flight that are measured.
        together: all arms are in memory, and every arm answers a part of the prompts before the next part begins.
            False: one arm at a time is in memory, and answers all prompts.
        short_turns: with `together`, a part has few prompts (`slices`), so that arms run under equal conditions. False:
            it has all prompts of a task.
        latency: in the first repeat all prompts are also sent as streaming requests.
        steady_s: length of the measured window of a turn, in seconds. In it the number of requests in flight is
            constant. None: a turn sends each prompt once.
        tie_gap: in nats. Answers must be equal except for near ties within this gap (`compare.py`). None: answers may
            differ.
    """

    concurrency: Sequence[int]
    repeats: int
    together: bool
    short_turns: bool
    latency: bool
    steady_s: float | None = None
    tie_gap: float | None = None


class Turn(NamedTuple):
    """One arm's requests for a part of a task's prompts, at one concurrency."""

    repeat: int
    task: int  # index
    concurrency: int
    part: slice  # of the task's prompts
    arm: int  # index
    stream: bool


Place = tuple[int, int, int]  # index of the task, concurrency, index of the arm


def turns(schedule: Schedule, repeat: int, *, n_prompts: Sequence[int], n_arms: int) -> Iterator[Turn]:
    """Yield the turns of a repeat in order.

    In the first repeat, if latency is measured, a streamed turn with the same prompts follows each unstreamed turn.
    """
    kinds = (False, True) if schedule.latency and repeat == 0 else (False,)
    places = [(task, concurrency) for task in range(len(n_prompts)) for concurrency in schedule.concurrency]
    if not schedule.together:
        for arm in rotated(range(n_arms), repeat):
            for task, concurrency in places:
                yield from (Turn(repeat, task, concurrency, EVERYTHING, arm, stream) for stream in kinds)
        return
    for task, concurrency in places:
        short = schedule.short_turns and schedule.steady_s is None
        parts = slices(n_prompts[task], concurrency) if short else [EVERYTHING]
        for n, part in enumerate(parts, start=repeat):
            for arm in rotated(range(n_arms), n):
                yield from (Turn(repeat, task, concurrency, part, arm, stream) for stream in kinds)


def sampling_of(task: Task, sampling: Sampling) -> Sampling:
    if task.n_answer is None:
        return sampling
    return replace(sampling, max_new_tokens=min(task.n_answer, sampling.max_new_tokens), ignore_eos=True)


@dataclass
class Bench:
    """Engines and their measurements so far. All answers are compared with `reference`."""

    engines: Sequence[Engine]
    tasks: Sequence[Task]
    schedule: Schedule
    sampling: Sampling
    answered: Callable[[Turn, Engine], None]  # called after each measured answer
    about: dict[str, dict[str, Any]] = field(default_factory=dict)  # descriptions, by arm
    flushed: dict[str, bool] = field(default_factory=dict)  # by arm: whether its prefix cache could be emptied
    widths: list[dict[str, Any]] = field(default_factory=list)  # number of steps at each width, per turn
    # The first engine's answers in the first repeat, at the first concurrency, by task. At steady load the engine
    # answers each prompt once before the first repeat.
    reference: dict[int, list[Completion]] = field(default_factory=dict)
    n_near_ties: int = 0
    began_s: float = field(default_factory=time.monotonic)
    failure: ServerError | None = None  # of an arm, after at least one complete repeat
    warm: set[tuple[int, int]] = field(default_factory=set)  # pairs of arm and concurrency already warmed up

    def n_asked(self) -> int | None:
        """Return the number of prompts of all measured turns; None at steady load, where it is not known before."""
        if self.schedule.steady_s is not None:
            return None
        every = (turn for repeat in range(self.schedule.repeats) for turn in self._turns(repeat))
        return sum(len(self.tasks[turn.task].prompts[turn.part]) for turn in every)

    def repeat(self, number: int) -> list[Row]:
        """Measure a repeat and return a row per task, concurrency and arm.

        Raises:
            GateError: answers differ by more than `Schedule.tie_gap` allows.
        """
        if self.schedule.steady_s is not None and not self.reference:
            self._answer_once()
        speeds, latencies = defaultdict[Place, list[Measurement]](list), defaultdict[Place, list[Measurement]](list)
        for arm, its_turns in groupby(self._turns(number), key=lambda turn: turn.arm):
            with self.engines[arm].running():
                if not self.schedule.together:  # the arm's server has just started
                    self.warm = {seen for seen in self.warm if seen[0] != arm}
                for turn in its_turns:
                    (latencies if turn.stream else speeds)[turn.task, turn.concurrency, arm].append(self.run(turn))
        if not self.reference:
            first = self.schedule.concurrency[0]
            self.reference = {task: joined(speeds[task, first, 0]).completions for task in range(len(self.tasks))}
        runs = {place: joined(its_runs) for place, its_runs in speeds.items()}
        streams = {place: joined(its_runs) for place, its_runs in latencies.items()}
        greedy = self.sampling.temperature == 0
        found = {place: self._differences(place, run) for place, run in runs.items() if greedy}
        if self.schedule.tie_gap is not None:
            different = list(found.items())
            if not self.schedule.tie_gap:  # streamed responses have no token ids, which the near-tie check needs
                different += [(place, self._differences(place, run)) for place, run in streams.items()]
            self._require_equal(different, self.schedule.tie_gap)
        rows = []
        for place, run in runs.items():
            task, concurrency, arm = place
            where = self.tasks[task].name, concurrency, self.engines[arm].name, number
            rows.append(row(where, run, streams.get(place), found.get(place)))
        return rows

    def _answer_once(self) -> None:
        """Fill `reference`: the first engine answers every prompt, unmeasured."""
        first = self.schedule.concurrency[0]
        with self.engines[0].running():
            for task, its in enumerate(self.tasks):
                turn = Turn(0, task, first, EVERYTHING, arm=0, stream=False)
                self.reference[task] = self._ask(turn, its.prompts, measured=False).completions

    def _turns(self, repeat: int) -> Iterator[Turn]:
        sizes = [len(task.prompts) for task in self.tasks]
        return turns(self.schedule, repeat, n_prompts=sizes, n_arms=len(self.engines))

    def run(self, turn: Turn) -> Measurement:
        """Measure a turn, after a short unmeasured warm-up. A steady load needs none: its window begins later."""
        engine, prompts = self.engines[turn.arm], self.tasks[turn.task].prompts
        self.about[engine.name] = self.about.get(engine.name) or engine.describe()
        if self.schedule.steady_s is None:
            n_warm = N_WARM_UP if (turn.arm, turn.concurrency) in self.warm else max(N_WARM_UP, turn.concurrency)
            self.warm.add((turn.arm, turn.concurrency))
            self._ask(turn, prompts[:n_warm], measured=False)
        began_s, widths, counted = time.monotonic() - self.began_s, engine.widths(), engine.counted()
        run = self._ask(turn, prompts[turn.part], measured=True)
        now, n_steps = engine.counted(), engine.widths()
        if widths is not None and n_steps is not None:
            new = {width: n - widths.get(width, 0) for width, n in n_steps.items() if n > widths.get(width, 0)}
            place = {"arm": engine.name, "task": self.tasks[turn.task].name, "concurrency": turn.concurrency}
            self.widths.append(place | {"began_s": round(began_s, 2), "wall_s": round(run.wall_s, 2), "n_steps": new})
        return run if counted is None or now is None else run._replace(counted=now.since(counted))

    def _ask(self, turn: Turn, prompts: Sequence[Prompt], *, measured: bool) -> Measurement:
        engine, sampling = self.engines[turn.arm], sampling_of(self.tasks[turn.task], self.sampling)
        self.flushed[engine.name] = engine.flush()

        def ask(prompt: Prompt) -> Callable[[], Completion]:
            read = engine.ask(prompt, sampling, stream=turn.stream)
            if measured:
                self.answered(turn, engine)
            return read

        if measured and self.schedule.steady_s is not None:
            seconds = self.schedule.steady_s
            return steady(ask, prompts, concurrency=turn.concurrency, seconds=seconds, processes=engine.processes)
        return timed(ask, prompts, concurrency=turn.concurrency, processes=engine.processes)

    def _require_equal(self, found: Sequence[tuple[Place, Sequence[Difference]]], gap: float) -> None:
        unequal = []
        for (task, concurrency, arm), its_differences in found:
            where = f"{self.engines[arm].name}, {self.tasks[task].name} at {concurrency}"
            for difference in its_differences:
                expected = self.reference[task][difference.prompt]
                agreed = (*expected.prompt_ids, *expected.token_ids[: difference.position])
                by_ids = isinstance(difference.expected, int) and expected.prompt_ids
                unequal.append(Unequal(where, difference, agreed if by_ids else ()))
        first = self.engines[0]
        with first.running() if gap and unequal else nullcontext():
            self.n_near_ties += require_equal(unequal, first.name, first.likeliest, gap)

    def _differences(self, place: Place, run: Measurement) -> list[Difference]:
        """Compare answers with the reference: token ids if both engines are of one kind and return them, else texts."""
        task, _, arm = place
        found, prompts = run.completions, run.prompts or range(len(run.completions))
        reference = [self.reference[task][prompt] for prompt in prompts]
        by_ids = self.engines[arm].kind == self.engines[0].kind and all(one.token_ids for one in (*reference, *found))
        its_differences = (
            differences([one.token_ids for one in reference], [one.token_ids for one in found])
            if by_ids
            else differences([one.text for one in reference], [one.text for one in found])
        )
        return [one._replace(prompt=prompts[one.prompt]) for one in its_differences]
