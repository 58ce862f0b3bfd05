"""JSON document and tables of a benchmark.

The Markdown tables have the layout of the DFlash model cards: tokens per second by task and concurrency, with the
speedup over the first arm, and the acceptance length averaged over concurrencies.
"""

import argparse
import os
import shlex
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, zip_longest
from typing import Any

from rich import box
from rich.table import Table

from sglang_dflash.flags import WidthPolicy
from sglang_dflash.pairs.servers.arms import OURS, STOCK
from sglang_dflash.pairs.servers.document import head, inherited, portable
from sglang_dflash.plot import Curve, Panel
from sglang_dflash.tools.bench.measure import Spread
from sglang_dflash.tools.bench.rows import Line, Row, means, summarise
from sglang_dflash.tools.bench.schedule import Bench

METHOD = (
    "tokens_per_s: generated tokens over the time from the first request sent to the last answer received, prefill "
    "included; answers are not streamed; median over repeats. ttft and tpot: time to the first text, and time per "
    "output token after it; percentiles over the requests of separate streamed runs in the first repeat. "
    "committed_per_step: accepted drafts + 1 bonus, mean over verify steps. acceptance_by_position: shares of steps "
    "whose 1st, 2nd, ... draft was accepted. n_equal: number of answers equal to the first arm's at the first "
    "concurrency, in the worst repeat; token ids are compared if both arms return them, else texts. Arms take turns in "
    "a rotating order. Ratios are computed per repeat; ranges are min and max over repeats. Every turn starts with a "
    "few unmeasured prompts. n_steps by width: number of steps of each verify width that this plugin's server took in "
    "a turn. steps_by_width: shares of these steps in all turns of a task and concurrency. means: over a task's "
    "concurrencies, per repeat. other_cores: CPU cores used meanwhile by other processes than the server and the "
    "client; null for servers of --base-url."
)
STEADY = (
    " Steady load: a new request follows each answer, with the prompts in order, again and again. tokens_per_s: tokens "
    "generated in a window that begins when the first requests, which begin together, have ended. A request's tokens "
    "count by the fraction of its time inside the window. n_whole: number of requests that began and ended inside it, "
    "fewest of all repeats. n_answers: number of requests with a part inside it."
)
FEW_STEPS = 100  # turns with fewer steps cause a warning: verify widths need some tens of steps to adapt
FLUSHED = "emptied before every turn"
KEPT = "not emptied (no known way for this server): repeated prompts may be read from it"
TOGETHER = "in memory together, each in turn for every part of the prompts"
WIDTHS = "steps by width"
QUIET = 0.05  # fraction of the cores that other processes may use in an undisturbed measurement
IN_TURN = "one at a time: in each repeat, an arm answers all prompts at every concurrency before the next arm starts"


@dataclass(frozen=True)
class BenchReport:
    """Results of a benchmark."""

    about: dict[str, Any]  # fields of the document except those below
    arms: dict[str, dict[str, Any]]  # descriptions by name, in the order of the arms
    rows: Sequence[Row]
    lines: Sequence[Line]
    means: Sequence[Line]  # means over concurrencies
    widths: Sequence[dict[str, Any]]  # number of steps at each verify width, per turn of an arm that counts them

    def document(self) -> dict[str, Any]:
        return self.about | {
            "arms": self.arms,
            "summary": [line.as_json() for line in self.lines],
            "means": [line.as_json() for line in self.means],
            "rows": [asdict(row) for row in self.rows],
            "widths": list(self.widths),
        }


def report(bench: Bench, rows: Sequence[Row], options: argparse.Namespace, *, command: str) -> BenchReport:
    names = [engine.name for engine in bench.engines]
    # Arms of this plugin with additional environment variables are also compared with the arm without these variables.
    base = [OURS] if any(name.startswith(f"{OURS}:") for name in names) else []
    over = [name for name in dict.fromkeys((names[0], STOCK, *base)) if name in names]
    about = head("bench", command)
    if options.base_url:  # the servers' hardware is unknown here
        about["level"] = "the servers' own machine, which is not known here"
        about["client"] = {name: about.pop(name) for name in ("machine", "versions")}
    gate = {"equal": True, "tie_gap": bench.schedule.tie_gap, "n_near_ties": bench.n_near_ties}
    about |= {
        "method": METHOD + ("" if bench.schedule.steady_s is None else STEADY),
        "steady_s": bench.schedule.steady_s,
        "arms_are": TOGETHER if bench.schedule.together else IN_TURN,
        "repeats": 1 + max(row.repeat for row in rows),
        "temperature": options.temperature,
        "thinking": options.enable_thinking,
        "max_new_tokens": options.max_new_tokens,
        "tasks": [task.describe() for task in bench.tasks],
        "gate": None if bench.schedule.tie_gap is None else gate,
        "environment": {name: portable(value) for name, value in inherited().items()},
    }
    cache = {name: {"prefix_cache": FLUSHED if bench.flushed[name] else KEPT} for name in names}
    lines = [replace(line, steps_by_width=_widths(line, bench.widths)) for line in summarise(rows, names, over)]
    arms = {name: _portable(bench.about[name]) | cache[name] for name in names}
    return BenchReport(about, arms, rows, lines, means(rows, names, over), bench.widths)


def warnings(report: BenchReport) -> Iterator[str]:
    """Yield reasons to distrust the numbers, one sentence each."""
    for name, arm in report.arms.items():
        if arm["prefix_cache"] == KEPT:
            yield f"{name}: prefix cache {KEPT}."
    for task, concurrency in dict.fromkeys((row.task, row.concurrency) for row in report.rows):
        here = [row for row in report.rows if (row.task, row.concurrency) == (task, concurrency)]
        if report.about["steady_s"] is None and len({row.n_prompt_tokens for row in here}) > 1:
            yield (
                f"{task}, {concurrency} in flight: arms read different numbers of prompt tokens; compare servers with "
                "the same tokenizer and chat template."
            )
    adapting = [name for name, arm in report.arms.items() if arm.get("width") == WidthPolicy.AUTO]
    yield from few_steps(report.widths, adapting)
    first = next(iter(report.arms))
    unequal = [line for line in report.lines if line.n_equal is not None and line.n_equal < line.n_answers]
    for name, lines in groupby(sorted(unequal, key=lambda line: line.arm), key=lambda line: line.arm):
        mine = list(lines)
        counts = [
            f"{x.n_answers - (x.n_equal or 0)} of {x.n_answers} ({x.task}, {x.concurrency} in flight)" for x in mine
        ]
        example = mine[0].first_differences[0]
        yield f"{name}: these answers differ from those of {first}: {'; '.join(counts)} ({example})."
    yield from noise(report.rows, os.cpu_count() or 1)


def few_steps(turns: Sequence[Mapping[str, Any]], adapting: Collection[str]) -> Iterator[str]:
    """Yield a warning per arm with a turn so short that its verify widths were still adapting.

    Args:
        turns: counts of steps by width, for each turn (`schedule.Turn`: an arm's requests for a part of the prompts).
        adapting: names of the arms whose widths adapt. The counts do not show this, because a fresh server of such an
            arm may begin with one width.
    """
    short = [turn for turn in turns if turn["arm"] in adapting and sum(turn["n_steps"].values()) < FEW_STEPS]
    for name in dict.fromkeys(turn["arm"] for turn in short):
        yield (
            f"{name}: some turns had fewer than {FEW_STEPS} steps, and verify widths need more to adapt; raise "
            "--max-new-tokens. With --base-url or --one-at-a-time more --num-prompts help too."
        )


def noise(rows: Sequence[Row], cores: int) -> Iterator[str]:
    """Yield a warning if other processes were busy during the measurement."""
    busiest = max((row.other_cores for row in rows if row.other_cores is not None), default=0.0)
    if busiest > QUIET * cores:
        yield (
            f"Not a quiet machine: other processes kept {busiest:.1f} cores busy, of {cores}; do not quote these "
            "numbers."
        )


def title_of(report: BenchReport) -> str:
    """Return the machine, SGLang's version and the commit, as a title; the arms' URLs for servers of `--base-url`."""
    about = report.about
    if "client" in about:
        urls = ", ".join(arm["url"] for arm in report.arms.values())
        return f"{urls} (machine not known), client of commit {about['commit']}"
    where = about["machine"]
    device = " + ".join(where["gpus"]) or where["cpu"]
    return f"{device}, {where['cores']} cores, SGLang {about['versions']['sglang']}, commit {about['commit']}"


def table(report: BenchReport) -> Table:
    """Return the summary for a terminal; the last lines of a task are its means over concurrencies."""
    about, lines = report.about, report.lines
    caption = (
        f"up to {about['max_new_tokens']} new tokens, temperature {about['temperature']:g}, thinking "
        f"{'on' if about['thinking'] else 'off'}; median (min–max) of {about['repeats']} interleaved repeats"
        + (f" of {about['steady_s']:g} s at steady load" if about.get("steady_s") else "")
        + ("; answers equal in all arms, except near ties" if about["gate"] else "")
    )
    table = Table(box=box.SIMPLE_HEAD, title=title_of(report), caption=caption)
    over = [arm for arm in report.arms if any(arm in line.over for line in lines)]
    with_equal = lines[0].n_equal is not None
    with_widths = any(line.steps_by_width for line in lines)
    with_latencies = any(line.ttft_ms["p50"] is not None for line in lines)
    latencies = ["TTFT ms\np50 / p99", "TPOT ms\np50 / p99"] if with_latencies else []
    requests = ["whole\nrequests"] if about.get("steady_s") else []
    names = ("task", "c", "arm", "tok/s", *requests, *(f"x {name}" for name in over), "acceptance\nlength", *latencies)
    for name in (*names, *(["equal"] if with_equal else []), *([WIDTHS] if with_widths else [])):
        table.add_column(name, justify="left" if name in ("arm", "task", WIDTHS) else "right", no_wrap=True)
    for task in dict.fromkeys(line.task for line in lines):
        for line in (line for line in (*lines, *report.means) if line.task == task):
            widths = (f"{width}: {share:.0%}" for width, share in line.steps_by_width.items() if share >= 0.005)
            table.add_row(
                *(line.task, str(line.concurrency), line.arm, _spread(line.tokens_per_s, 0)),
                *([str(line.n_whole)] if requests else []),
                *(_spread(line.over.get(name), 2) for name in over),
                _number(line.committed_per_step, 2),
                *([_pair(line.ttft_ms, 0), _pair(line.tpot_ms, 1)] if with_latencies else []),
                *(["–" if line.n_equal is None else f"{line.n_equal} of {line.n_answers}"] if with_equal else []),
                *([", ".join(widths)] if with_widths else []),
            )
    return table


def panels(report: BenchReport) -> list[list[Panel]]:
    """Return a row per task: tokens per second by concurrency, and acceptance by slot if an arm counts it."""
    found = []
    for task in dict.fromkeys(line.task for line in report.lines):
        by_arm = {arm: [line for line in report.lines if (line.task, line.arm) == (task, arm)] for arm in report.arms}
        speeds = {
            arm: Curve([int(line.concurrency) for line in lines], [line.tokens_per_s.median for line in lines])
            for arm, lines in by_arm.items()
        }
        row = [Panel(task, "requests in flight", "tokens per second, median", speeds, doubling=True)]
        shares = {
            arm: [
                statistics.mean(at) for at in zip_longest(*(line.acceptance_by_position for line in lines), fillvalue=0)
            ]
            for arm, lines in by_arm.items()
        }
        by_slot = {arm: Curve(range(1, len(values) + 1), values) for arm, values in shares.items() if values}
        if by_slot:
            row.append(Panel(f"{task}, mean over concurrencies", "slot", "share of steps that accept it", by_slot))
        found.append(row)
    return found


def _pair(ms: Mapping[str, float | None], n_digits: int) -> str:
    return " / ".join(_number(value, n_digits) for value in ms.values())


def markdown(arms: Sequence[str], lines: Sequence[Line]) -> str:
    """Return tokens per second, and acceptance lengths if counted, as Markdown in the model cards' layout."""
    speeds = [["Task", "Concurrency", *arms]]
    committed = [["Task", *arms[1:]] if len(arms) > 1 else ["Task", *arms]]
    for task in dict.fromkeys(line.task for line in lines):
        mine = [line for line in lines if line.task == task]
        for i, concurrency in enumerate(dict.fromkeys(line.concurrency for line in mine)):
            by_arm = {line.arm: line for line in mine if line.concurrency == concurrency}
            speeds.append(["" if i else task, str(concurrency), *(_speed(by_arm[name], arms[0]) for name in arms)])
        values = [[line.committed_per_step for line in mine if line.arm == name] for name in committed[0][1:]]
        means = [statistics.mean(n for n in one if n is not None) if None not in one else None for one in values]
        if any(mean is not None for mean in means):
            committed.append([task, *(_number(mean, 2) for mean in means)])
    parts = [f"Tokens/sec (speedup over {arms[0]}, medians)", _markdown(speeds, n_left=1)]
    if len(committed) > 1:
        several = len({line.concurrency for line in lines}) > 1
        parts += ["Acceptance length" + several * " (mean over concurrencies)", _markdown(committed, n_left=1)]
    return "\n\n".join(parts)


def _markdown(rows: Sequence[Sequence[str]], *, n_left: int) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{'---|' * n_left}{'---:|' * (len(rows[0]) - n_left)}", *body])


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _speed(line: Line, first: str) -> str:
    speedup = line.over.get(first)
    return f"{line.tokens_per_s.median:.0f}" + (f" ({speedup.median:.1f}x)" if speedup else "")


def _spread(value: Spread | None, digits: int) -> str:
    """Return `median (low–high)`, or only the median if low and high are equal once rounded."""
    if value is None:
        return ""
    median, low, high = (f"{number:.{digits}f}" for number in value)
    return median if low == high else f"{median} ({low}–{high})"


def _widths(line: Line, turns: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of steps at each verify width, over all turns of a line's task, concurrency and arm."""
    place = line.task, line.concurrency, line.arm
    mine = [turn["n_steps"] for turn in turns if (turn["task"], turn["concurrency"], turn["arm"]) == place]
    n_steps = sum(map(Counter, mine), Counter[str]())
    return {width: round(n / n_steps.total(), 4) for width, n in sorted(n_steps.items(), key=lambda one: int(one[0]))}


def _portable(about: Mapping[str, Any]) -> dict[str, Any]:
    command = {"command": portable(shlex.join(about["command"]))} if "command" in about else {}
    env = {"env": {name: portable(value) for name, value in about["env"].items()}} if "env" in about else {}
    return dict(about) | {"model": portable(about.get("model", ""))} | command | env
