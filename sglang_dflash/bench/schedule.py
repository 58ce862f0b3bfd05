"""Who answers what when. Arms take turns, in an order that rotates; what a turn is depends on what a switch costs.

In memory together, arms change after every part of the prompts. One at a time, each answers everything at every
concurrency before the next one starts. An arm is warmed up before each turn, and its prefix cache is emptied.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, NamedTuple

from sglang_dflash.bench.chat import Prompt, Sampling
from sglang_dflash.bench.compare import Difference, differences
from sglang_dflash.bench.engine import Engine
from sglang_dflash.bench.gate import Found, require_equal
from sglang_dflash.bench.measure import EVERYTHING, Answer, Run, joined, rotated, slices, timed
from sglang_dflash.bench.prompts import Task
from sglang_dflash.bench.rows import Row, row

N_WARM_UP = 2  # unmeasured prompts after an arm gets the machine back; at first as many as are in flight
N_SHOWN = 3  # differences that a row names


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    together: arms are in memory side by side and change after every part; otherwise after everything.
    short_turns: a part is a few prompts (`measure.slices`), so that arms that share a machine meet the same machine.
    latency: the first repeat is also asked streamed.
    tie_gap: answers have to be equal but for near ties of that gap in log-probability (`gate.py`); None: they need not.
    """

    concurrency: Sequence[int]
    repeats: int
    together: bool
    short_turns: bool
    latency: bool
    tie_gap: float | None = None


class Turn(NamedTuple):
    repeat: int
    task: int
    concurrency: int
    part: slice
    arm: int
    stream: bool


Place = tuple[int, int, int]  # task, concurrency, arm


def turns(plan: Plan, repeat: int, *, n_prompts: Sequence[int], n_arms: int) -> Iterator[Turn]:
    """Those of one repeat, in order. Where speed and latency are both measured, speed comes first."""
    kinds = (False, True) if plan.latency and repeat == 0 else (False,)
    places = [(task, concurrency) for task in range(len(n_prompts)) for concurrency in plan.concurrency]
    if not plan.together:
        for arm in rotated(range(n_arms), repeat):
            for task, concurrency in places:
                yield from (Turn(repeat, task, concurrency, EVERYTHING, arm, stream) for stream in kinds)
        return
    for task, concurrency in places:
        parts = slices(n_prompts[task], concurrency) if plan.short_turns else [EVERYTHING]
        for n, part in enumerate(parts, start=repeat):
            for arm in rotated(range(n_arms), n):
                yield from (Turn(repeat, task, concurrency, part, arm, stream) for stream in kinds)


def sampling_of(task: Task, sampling: Sampling) -> Sampling:
    if task.n_answer is None:
        return sampling
    return replace(sampling, max_new_tokens=min(task.n_answer, sampling.max_new_tokens), ignore_eos=True)


@dataclass
class Bench:
    """Engines, the first of which the others are compared with, and what they were seen to do."""

    engines: Sequence[Engine]
    tasks: Sequence[Task]
    plan: Plan
    sampling: Sampling
    answered: Callable[[Turn, Engine], None]  # called with each answer that came
    about: dict[str, dict[str, Any]] = field(default_factory=dict)  # by arm, as `Engine.describe` tells it
    flushed: dict[str, bool] = field(default_factory=dict)  # by arm: whether its prefix cache could be emptied
    widths: list[dict[str, Any]] = field(default_factory=list)  # of each turn whose engine tells
    reference: dict[int, list[Answer]] = field(default_factory=dict)  # by task
    n_near_ties: int = 0
    began_s: float = field(default_factory=time.monotonic)
    warm: set[tuple[int, int]] = field(default_factory=set)  # arm and concurrency that have been seen

    def n_asked(self) -> int:
        """Prompts of all measured turns."""
        sizes = [len(task.prompts) for task in self.tasks]
        every = (turns(self.plan, r, n_prompts=sizes, n_arms=len(self.engines)) for r in range(self.plan.repeats))
        return sum(len(range(*turn.part.indices(sizes[turn.task]))) for one in every for turn in one)

    @property
    def compares(self) -> bool:
        """Whether answers can be expected to be the same."""
        return self.sampling.temperature == 0

    def repeat(self, number: int) -> list[Row]:
        """One row per task, concurrency and arm.

        Raises:
            GateError: answers differ that have to be equal.
        """
        speeds, latencies = defaultdict[Place, list[Run]](list), defaultdict[Place, list[Run]](list)
        sizes = [len(task.prompts) for task in self.tasks]
        order = turns(self.plan, number, n_prompts=sizes, n_arms=len(self.engines))
        for arm, its_turns in groupby(order, key=lambda turn: turn.arm):
            with self.engines[arm].running():
                if not self.plan.together:  # it has just started
                    self.warm = {seen for seen in self.warm if seen[0] != arm}
                for turn in its_turns:
                    (latencies if turn.stream else speeds)[turn.task, turn.concurrency, arm].append(self.run(turn))
        if not self.reference:
            self.reference = {i: joined(speeds[i, self.plan.concurrency[0], 0]).answers for i in range(len(sizes))}
        runs = {place: joined(its_runs) for place, its_runs in speeds.items()}
        found = {place: self._differences(place, run) for place, run in runs.items()} if self.compares else {}
        if self.plan.tie_gap is not None:
            streamed = {place: self._differences(place, joined(its_runs)) for place, its_runs in latencies.items()}
            # A stream tells no token ids, from which a near tie is told.
            self._require_equal([found] if self.plan.tie_gap else [found, streamed], self.plan.tie_gap)
        return [self._row(place, number, runs[place], latencies[place], found.get(place)) for place in runs]

    def run(self, turn: Turn) -> Run:
        """A measured turn after a short unmeasured one."""
        engine, prompts = self.engines[turn.arm], self.tasks[turn.task].prompts
        self.about[engine.name] = self.about.get(engine.name) or engine.describe()
        n_warm = N_WARM_UP if (turn.arm, turn.concurrency) in self.warm else max(N_WARM_UP, turn.concurrency)
        self.warm.add((turn.arm, turn.concurrency))
        self._ask(turn, prompts[:n_warm])
        began_s, widths, counted = time.monotonic() - self.began_s, engine.widths(), engine.counted()
        run = self._ask(turn, prompts[turn.part], then=self.answered)
        now, n_steps = engine.counted(), engine.widths()
        if widths is not None and n_steps is not None:
            new = {width: n - widths.get(width, 0) for width, n in n_steps.items() if n > widths.get(width, 0)}
            place = {"arm": engine.name, "task": self.tasks[turn.task].name, "concurrency": turn.concurrency}
            self.widths.append(place | {"began_s": round(began_s, 2), "wall_s": round(run.wall_s, 2), "n_steps": new})
        return run if counted is None or now is None else run._replace(counted=now.since(counted))

    def _ask(self, turn: Turn, prompts: Sequence[Prompt], then: Callable[[Turn, Engine], None] | None = None) -> Run:
        engine, sampling = self.engines[turn.arm], sampling_of(self.tasks[turn.task], self.sampling)
        self.flushed[engine.name] = engine.flush()

        def ask(prompt: Prompt) -> Callable[[], Answer]:
            read = engine.ask(prompt, sampling, stream=turn.stream)
            if then is not None:
                then(turn, engine)
            return read

        return timed(ask, prompts, concurrency=turn.concurrency, processes=engine.processes)

    def _row(
        self, place: Place, repeat: int, speed: Run, latencies: Sequence[Run], found: Sequence[Difference] | None
    ) -> Row:
        task, concurrency, arm = place
        where = {"task": self.tasks[task].name, "concurrency": concurrency, "arm": self.engines[arm].name}
        steps = speed.steps
        return row(where | {"repeat": repeat}, speed, joined(latencies) if latencies else None) | {
            "n_answers": len(speed.answers),
            "n_equal": None if found is None else len(speed.answers) - len(found),
            "first_differences": [str(difference) for difference in (found or [])[:N_SHOWN]],
            "n_prompt_tokens": sum(answer.n_prompt_tokens for answer in speed.answers),
            "acceptance_by_position": [round(share, 4) for share in steps.acceptance_by_position] if steps else [],
        }

    def _require_equal(self, found: Sequence[Mapping[Place, Sequence[Difference]]], gap: float) -> None:
        different = []
        for (task, concurrency, arm), its_differences in chain.from_iterable(each.items() for each in found):
            where = f"{self.engines[arm].name}, {self.tasks[task].name} at {concurrency}"
            for difference in its_differences:
                expected = self.reference[task][difference.prompt]
                agreed = (*expected.prompt_ids, *expected.token_ids[: difference.position])
                by_ids = isinstance(difference.expected, int) and expected.prompt_ids
                different.append(Found(where, difference, agreed if by_ids else ()))
        self.n_near_ties += require_equal(different, self.engines[0], gap)

    def _differences(self, place: Place, speed: Run) -> list[Difference]:
        """From the first arm's at the first concurrency, by token ids where both are of one kind and tell them."""
        task, _, arm = place
        reference, answers = self.reference[task], speed.answers
        by_ids = self.engines[arm].kind == self.engines[0].kind and all(one.token_ids for one in (*reference, *answers))
        if by_ids:
            return differences([one.token_ids for one in reference], [one.token_ids for one in answers])
        return differences([one.text for one in reference], [one.text for one in answers])
