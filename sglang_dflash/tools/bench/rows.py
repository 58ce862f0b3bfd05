"""Measurements as rows of a document, and their summary as lines of a table.

Every number of a line is computed from rows, except `steps_by_width`. Unknown values are None, in JSON null.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, zip_longest
from operator import attrgetter
from typing import Any

from sglang_dflash.tools.bench.compare import Difference
from sglang_dflash.tools.bench.measure import Measurement, Spread, percentile, ratios, spread

N_SHOWN = 3  # number of differences that a row describes at most
MEAN = "mean"  # `Line.concurrency` of a mean over all concurrencies


@dataclass(frozen=True)
class Row:
    """One repeat of one arm, for one task and concurrency."""

    task: str
    concurrency: int
    arm: str
    repeat: int
    wall_s: float
    n_tokens: int
    tokens_per_s: float
    committed_per_step: float | None
    other_cores: float | None  # cores used by processes other than engine and client
    ttft_ms: list[float]  # one per streamed answer with text
    tpot_ms: list[float]
    n_answers: int
    n_equal: int | None  # number of answers equal to the first arm's; None: not compared
    first_differences: list[str]
    n_prompt_tokens: int
    acceptance_by_position: list[float]
    n_whole: int  # number of requests that began and ended inside the measurement


@dataclass(frozen=True)
class Line:
    """All repeats of one arm, for one task and concurrency."""

    task: str
    concurrency: int | str
    arm: str
    tokens_per_s: Spread
    committed_per_step: float | None
    ttft_ms: dict[str, float | None]  # p50 and p99
    tpot_ms: dict[str, float | None]
    other_cores_max: float | None
    over: dict[str, Spread]  # speedup over other arms, by their names
    n_answers: int
    n_equal: int | None  # in the worst repeat
    first_differences: list[str]
    acceptance_by_position: list[float]
    n_whole: int = 0  # requests that began and ended inside the measurement, fewest of all repeats
    steps_by_width: dict[str, float] = field(default_factory=dict)  # share of steps at each verify width

    def as_json(self) -> dict[str, Any]:
        """Return the line for a document, with `over_<arm>` for each speedup."""
        values = asdict(self)
        over = {f"over_{arm}": one._asdict() for arm, one in values.pop("over").items()}
        return values | {"tokens_per_s": self.tokens_per_s._asdict()} | over


def row(
    place: tuple[str, int, str, int],
    speed: Measurement,
    latency: Measurement | None = None,
    found: Sequence[Difference] | None = None,
) -> Row:
    """Return the row of a measurement.

    Args:
        place: task, concurrency, arm and repeat.
        latency: the streamed measurement; None if nothing was streamed.
        found: differences from the first arm's answers; None if answers are not compared.
    """
    streamed = latency.completions if latency else []
    n_answers, steps = len(speed.completions), speed.steps
    return Row(
        *place, round(speed.wall_s, 4), speed.n_tokens, round(speed.tokens_per_s, 2),
        known(steps.committed_per_step, 4) if steps else None, known(speed.other_cores, 3),
        ttft_ms=[round(one.ttft_s * 1e3, 2) for one in streamed if one.ttft_s == one.ttft_s],
        tpot_ms=[round(one.tpot_s * 1e3, 3) for one in streamed if one.tpot_s == one.tpot_s],
        n_answers=n_answers,
        n_equal=None if found is None else n_answers - len(found),
        first_differences=[str(difference) for difference in (found or [])[:N_SHOWN]],
        n_prompt_tokens=sum(one.n_prompt_tokens for one in speed.completions),
        acceptance_by_position=[round(share, 4) for share in steps.acceptance_by_position] if steps else [],
        n_whole=speed.n_whole,
    )  # fmt: skip


def summarise(rows: Sequence[Row], arms: Sequence[str], over: Sequence[str]) -> list[Line]:
    """Return a line per task, concurrency (ascending) and arm (in the order of `arms`).

    Args:
        over: names of the baselines. Each arm except the first gets its speedup over every other arm in `over`,
            computed repeat by repeat.
    """
    lines = []
    for task in dict.fromkeys(row.task for row in rows):
        for concurrency in sorted({row.concurrency for row in rows if row.task == task}):
            here = [row for row in rows if (row.task, row.concurrency) == (task, concurrency)]
            lines += [_line(here, arm, over, first=arms[0]) for arm in arms if any(row.arm == arm for row in here)]
    return lines


def means(rows: Sequence[Row], arms: Sequence[str], over: Sequence[str]) -> list[Line]:
    """Average each repeat over its concurrencies, and summarise the means. A task with one concurrency has no line."""
    found, place = list[Row](), attrgetter("task", "arm", "repeat")
    for _, group in groupby(sorted(rows, key=place), key=place):
        here = list(group)
        committed = [row.committed_per_step for row in here if row.committed_per_step is not None]
        speed = statistics.mean(row.tokens_per_s for row in here)
        mean = statistics.mean(committed) if len(committed) == len(here) else None
        one = replace(here[0], concurrency=0, tokens_per_s=speed, committed_per_step=mean, other_cores=None)
        if len(here) > 1:
            found.append(replace(one, ttft_ms=[], tpot_ms=[], n_equal=None))
    return [replace(line, concurrency=MEAN) for line in summarise(found, arms, over)]


def _line(here: Sequence[Row], arm: str, over: Sequence[str], first: str) -> Line:
    mine = [row for row in here if row.arm == arm]
    worst = min(mine, key=lambda row: row.n_equal or 0)
    speedups = dict[str, Spread]()
    for other in over:
        theirs = _speeds(here, other)
        if theirs and arm not in (other, first):
            speedups[other] = _rounded(ratios(_speeds(here, arm), theirs))
    committed = [row.committed_per_step for row in mine if row.committed_per_step is not None]
    shares = zip_longest(*(row.acceptance_by_position for row in mine), fillvalue=0.0)
    return Line(
        *(worst.task, worst.concurrency, arm, _rounded(spread(_speeds(here, arm)))),
        committed_per_step=round(statistics.median(committed), 3) if committed else None,
        ttft_ms=_percentiles([value for row in mine for value in row.ttft_ms]),
        tpot_ms=_percentiles([value for row in mine for value in row.tpot_ms]),
        other_cores_max=max((row.other_cores for row in mine if row.other_cores is not None), default=None),
        over=speedups,
        n_answers=worst.n_answers,
        n_equal=worst.n_equal,
        first_differences=worst.first_differences,
        acceptance_by_position=[round(statistics.mean(position), 4) for position in shares],
        n_whole=min(row.n_whole for row in mine),
    )


def known(value: float, digits: int) -> float | None:
    """Return `value` rounded; None for nan, which JSON does not have."""
    return round(value, digits) if value == value else None


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{p}": known(percentile(values, p), 3) for p in (50, 99)}


def _rounded(value: Spread) -> Spread:
    return Spread(*(round(number, 3) for number in value))


def _speeds(rows: Sequence[Row], arm: str) -> list[float]:
    """Return an arm's tokens per second, in the order of repeats."""
    return [row.tokens_per_s for row in sorted(rows, key=lambda row: row.repeat) if row.arm == arm]
