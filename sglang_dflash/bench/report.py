"""The benchmark's document, and the tables people read.

The Markdown table has the layout of the DFlash model cards: tokens per second by task and concurrency, with the speedup
over the first arm, and committed tokens per step as the cards average them, over concurrencies.
"""

import argparse
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any

from rich import box
from rich.table import Table

from sglang_dflash.bench.rows import Row, compared_with, shown, summarise
from sglang_dflash.bench.schedule import Bench
from sglang_dflash.servers.arms import OURS, STOCK
from sglang_dflash.servers.document import head, inherited, portable

METHOD = (
    "tokens_per_s: generated tokens over the time from the first request sent to the last answer received, unstreamed, "
    "prefill included, median over repeats. ttft and tpot: time to first text and time per output token after it, from "
    "streamed runs of their own in the first repeat, percentiles over its requests. committed_per_step: accepted "
    "drafts + 1 bonus, mean over verify steps. acceptance_by_position: the share of steps whose 1st, 2nd, ... draft "
    "was accepted. n_equal: answers that are the first arm's at the first concurrency, in the worst repeat; by token "
    "ids where both arms are the same kind of server and tell them, else by text. Arms take turns in an order that "
    "rotates; ratios are taken repeat by repeat; spreads are min and max over repeats. Every turn starts with a few "
    "unmeasured prompts. n_steps by width: steps a server of ours took in a turn; steps_by_width: their shares in all "
    "turns of a place. means: over a task's concurrencies, repeat by repeat. other_cores: CPU that processes "
    "other than the measured server and the client used meanwhile, where they are on this machine."
)
FLUSHED = "emptied before every turn"
KEPT = "not emptied (no known way for this server): prompts that were asked before may be read from it"
TOGETHER = "in memory together, changing after every part of the prompts"
MEAN, WIDTHS = "mean", "steps by width"
IN_TURN = "one at a time: each answers everything, at every concurrency, before the next one starts"


def document(bench: Bench, rows: Sequence[Row], options: argparse.Namespace, *, command: str) -> dict[str, Any]:
    names = [engine.name for engine in bench.engines]
    base = [OURS] if any(name.startswith(f"{OURS}:") for name in names) else []  # of arms with an environment
    over = [name for name in dict.fromkeys((names[0], STOCK, *base)) if name in names]
    lines = summarise(rows, place=["task", "concurrency"], arms=names, over=over)
    found = head("bench", command)
    if options.base_url:  # what the servers run on is not known here
        found["level"] = "the servers' own machine, not known here: machine and versions are the client's"
    return found | {
        "method": METHOD,
        "arms_are": TOGETHER if bench.plan.together else IN_TURN,
        "repeats": 1 + max(row["repeat"] for row in rows),
        "temperature": options.temperature,
        "thinking": options.enable_thinking,
        "max_new_tokens": options.max_new_tokens,
        "tasks": [task.describe() for task in bench.tasks],
        "arms": {
            name: _portable(bench.about[name]) | {"prefix_cache": FLUSHED if bench.flushed[name] else KEPT}
            for name in names
        },
        "gate": None
        if bench.plan.tie_gap is None
        else {"equal": True, "tie_gap": bench.plan.tie_gap, "n_near_ties": bench.n_near_ties},
        "environment": {name: portable(value) for name, value in inherited().items()},
        "summary": [line | _compared(line, rows) | _widths(line, bench.widths) for line in lines],
        "means": means(rows, arms=names, over=over),
        "rows": list(rows),
        "widths": bench.widths,
    }


def means(rows: Sequence[Row], *, arms: Sequence[str], over: Sequence[str]) -> list[Row]:
    """Lines like the summary's, of tasks with several concurrencies."""
    found = list[Row]()
    by_arm = sorted(rows, key=lambda row: (row["task"], row["arm"], row["repeat"]))
    for (task, arm, repeat), group in groupby(by_arm, key=lambda row: (row["task"], row["arm"], row["repeat"])):
        here = list(group)
        committed = [row["committed_per_step"] for row in here]
        if len(here) > 1:
            found.append(
                {
                    **{"task": task, "arm": arm, "repeat": repeat, "concurrency": MEAN},
                    "tokens_per_s": statistics.mean(row["tokens_per_s"] for row in here),
                    "committed_per_step": None if None in committed else statistics.mean(committed),
                    **{"other_cores": None, "ttft_ms": [], "tpot_ms": []},
                }
            )
    return [
        line | {"n_equal": None, "steps_by_width": {}}
        for line in summarise(found, place=["task", "concurrency"], arms=arms, over=over)
    ]


def lines_of(document: Mapping[str, Any]) -> Iterator[Row]:
    """The summary, with each task's means at its end."""
    for task, lines in groupby(document["summary"], key=lambda line: line["task"]):
        yield from lines
        yield from (line for line in document["means"] if line["task"] == task)


def warnings(document: Mapping[str, Any]) -> Iterator[str]:
    """What a reader of the numbers has to know."""
    for name, arm in document["arms"].items():
        if arm["prefix_cache"] == KEPT:
            yield f"{name}: prefix cache {KEPT}."
    for task, concurrency in dict.fromkeys((row["task"], row["concurrency"]) for row in document["rows"]):
        here = [row for row in document["rows"] if (row["task"], row["concurrency"]) == (task, concurrency)]
        if len({row["n_prompt_tokens"] for row in here}) > 1:
            yield f"{task}, {concurrency} in flight: arms read different numbers of prompt tokens; templates differ."
    first = next(iter(document["arms"]))
    unequal = [x for x in document["summary"] if x["n_equal"] is not None and x["n_equal"] < x["n_answers"]]
    for name, lines in groupby(sorted(unequal, key=lambda line: line["arm"]), key=lambda line: line["arm"]):
        told = list(lines)
        counts = [
            f"{x['task']} at {x['concurrency']}, {x['n_answers'] - x['n_equal']} of {x['n_answers']}" for x in told
        ]
        example = told[0]["first_differences"][0]
        yield f"{name}: answers that are not {first}'s at the first concurrency: {'; '.join(counts)} ({example})."


def table(document: Mapping[str, Any]) -> Table:
    """The summary for a terminal."""
    where, summary = document["machine"], document["summary"]
    caption = (
        f"up to {document['max_new_tokens']} new tokens, temperature {document['temperature']:g}, thinking "
        f"{'on' if document['thinking'] else 'off'}; median (min–max) of {document['repeats']} interleaved repeats"
        + ("; answers equal in all arms" if document["gate"] else "")
    )
    device = " + ".join(where["gpus"]) or where["cpu"]
    title = f"{device}, {where['cores']} cores, SGLang {document['versions']['sglang']}, commit {document['commit']}"
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption)
    over, with_equal = compared_with(summary, document["arms"]), summary[0]["n_equal"] is not None
    latencies = "TTFT ms\np50 / p99", "TPOT ms\np50 / p99"
    names = ("task", "c", "arm", "tok/s", *(f"x {name}" for name in over), "committed\nper step", *latencies)
    with_widths = any(line["steps_by_width"] for line in summary)
    for name in (*names, *(["equal"] if with_equal else []), *([WIDTHS] if with_widths else [])):
        table.add_column(name, justify="left" if name in ("arm", "task", WIDTHS) else "right", no_wrap=True)
    for line in lines_of(document):
        table.add_row(
            line["task"],
            str(line["concurrency"]),
            line["arm"],
            shown(line["tokens_per_s"], 0),
            *(shown(line.get(f"over_{name}"), 2) for name in over),
            number(line["committed_per_step"], 2),
            percentiles(line["ttft_ms"], 0),
            percentiles(line["tpot_ms"], 1),
            *([equal(line)] if with_equal else []),
            *([widths(line)] if with_widths else []),
        )
    return table


def equal(line: Row) -> str:
    return "–" if line["n_equal"] is None else f"{line['n_equal']} of {line['n_answers']}"


def widths(line: Row) -> str:
    return ", ".join(f"{width}: {share:.0%}" for width, share in line["steps_by_width"].items() if share >= 0.005)


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def percentiles(value: Mapping[str, float | None], digits: int) -> str:
    return f"{number(value['p50'], digits)} / {number(value['p99'], digits)}"


def cards(document: Mapping[str, Any]) -> tuple[list[list[str]], list[list[str]]]:
    """Tokens per second, and committed tokens per step, as the model cards have them; each begins with its head.

    The second is empty but for its head where no server tells.
    """
    names, summary = list(document["arms"]), document["summary"]
    speeds = [["Task", "Concurrency", *names]]
    committed = [["Task", *names[1:]] if len(names) > 1 else ["Task", *names]]
    for task in dict.fromkeys(line["task"] for line in summary):
        mine = [line for line in summary if line["task"] == task]
        for i, concurrency in enumerate(dict.fromkeys(line["concurrency"] for line in mine)):
            by_arm = {line["arm"]: line for line in mine if line["concurrency"] == concurrency}
            speeds.append(["" if i else task, str(concurrency), *(_speed(by_arm[name], names[0]) for name in names)])
        values = [[line["committed_per_step"] for line in mine if line["arm"] == name] for name in committed[0][1:]]
        if any(None not in told for told in values):
            committed.append([task, *("–" if None in told else f"{statistics.mean(told):.2f}" for told in values)])
    return speeds, committed


def markdown(document: Mapping[str, Any]) -> str:
    speeds, committed = cards(document)
    first = next(iter(document["arms"]))
    parts = [f"Tokens/sec (speedup over {first}, medians)", _markdown(speeds, n_left=1)]
    if len(committed) > 1:
        parts += ["Committed tokens per step (mean over concurrencies)", _markdown(committed, n_left=1)]
    return "\n\n".join(parts)


def _markdown(rows: Sequence[Sequence[str]], *, n_left: int) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{'---|' * n_left}{'---:|' * (len(rows[0]) - n_left)}", *body])


def _speed(line: Mapping[str, Any], first: str) -> str:
    speedup = line.get(f"over_{first}")
    return f"{line['tokens_per_s']['median']:.0f}" + (f" ({speedup['median']:.1f}x)" if speedup else "")


def _compared(line: Row, rows: Sequence[Row]) -> Row:
    """What a summary of ours has beside speeds and latencies."""
    fields = ("task", "concurrency", "arm")
    mine = [row for row in rows if all(row[field] == line[field] for field in fields)]
    worst = min(mine, key=lambda row: row["n_equal"] if row["n_equal"] is not None else 0)
    shares = zip_longest(*(row["acceptance_by_position"] for row in mine), fillvalue=0.0)
    return {
        **{field: worst[field] for field in ("n_answers", "n_equal", "first_differences")},
        "acceptance_by_position": [round(statistics.mean(position), 4) for position in shares],
    }


def _widths(line: Row, turns: Sequence[Mapping[str, Any]]) -> Row:
    fields = ("task", "concurrency", "arm")
    mine = [turn["n_steps"] for turn in turns if all(turn[field] == line[field] for field in fields)]
    n_steps = sum(map(Counter, mine), Counter[str]())
    shares = {width: round(n / n_steps.total(), 4) for width, n in sorted(n_steps.items(), key=lambda one: int(one[0]))}
    return {"steps_by_width": shares}


def _portable(about: Mapping[str, Any]) -> dict[str, Any]:
    command = {"command": portable(shlex.join(about["command"]))} if "command" in about else {}
    env = {"env": {name: portable(value) for name, value in about["env"].items()}} if "env" in about else {}
    return dict(about) | {"model": portable(about.get("model", ""))} | command | env
