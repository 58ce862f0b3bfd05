"""The benchmark's document as one HTML page. It refers to nothing outside itself, so it opens without a network."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from sglang_dflash.bench.plots import Bar, Line, Point, key, line_plot, shades, share_plot
from sglang_dflash.bench.report import cards, equal, lines_of, number, percentiles, warnings
from sglang_dflash.bench.rows import Row, compared_with, noise, shown

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #667080; --rule: #d9dee5; --paper: #ffffff; --note: #fff6dd;
  --c0: #7b8494; --c1: #d97706; --c2: #2563eb; --c3: #059669; --c4: #9333ea; --c5: #dc2626;
  --w0: #d3e3f8; --w1: #b8d2f5; --w2: #98bdef; --w3: #78a6e8; --w4: #588ede; --w5: #3a73d3;
  --w6: #2557b0; --w7: #173b7f }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #98a2b3; --rule: #333b47; --paper: #14181e;
  --note: #3a3116; --c0: #98a2b3; --c1: #f59e0b; --c2: #6ea0ff; --c3: #34d399; --c4: #c084fc; --c5: #f87171;
  --w0: #1d3557; --w1: #244a80; --w2: #2d60a6; --w3: #3f79c6; --w4: #5c95db; --w5: #82b0ea; --w6: #abcbf4;
  --w7: #d8e7fb } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem } p { margin: .4rem 0 }
.dim, caption { color: var(--dim) } .note { background: var(--note); padding: .4rem .8rem; border-radius: 4px }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } caption { text-align: left }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap }
th { font-weight: 600; vertical-align: bottom; white-space: normal } .left { text-align: left }
.small { font-size: 13px } .small th, .small td { padding-right: .6rem }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem }
svg { width: 100%; height: auto; font-size: 11px } svg text { fill: var(--dim) }
svg .title { fill: var(--ink); font-size: 13px; font-weight: 600 }
.grid, .axis, .level { stroke: var(--rule); fill: none } .axis, .level { stroke: var(--dim) }
.level { stroke-dasharray: 2 3 } .line { fill: none; stroke-width: 2 } .dashed { stroke-dasharray: 6 4 }
.spread { stroke-width: 5; opacity: .3 } .key span { margin-right: 1.2rem; white-space: nowrap }
.key i { display: inline-block; width: 1.4rem; border-top: 3px solid; margin-right: .4rem; vertical-align: middle }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: color-mix(in srgb, var(--rule) 40%, transparent);
  padding: .6rem; border-radius: 4px; font-size: 13px } summary { cursor: pointer }
"""


def render(document: Mapping[str, Any]) -> str:
    """The whole page, as UTF-8 text."""
    body = "\n".join(_body(document))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>DFlash benchmark</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _body(document: Mapping[str, Any]) -> Iterator[str]:
    where = document["machine"]
    device = " + ".join(where["gpus"]) or f"{where['cpu']}, {where['cores']} cores"
    yield "<h1>DFlash benchmark</h1>"
    yield f'<p class="dim">{escape(device)} · {document["when"]} · commit {document["commit"]} · '
    yield f"SGLang {document['versions']['sglang']} · {escape(document['level'])}</p>"
    yield f"<p>{escape(_conditions(document))}</p>"
    for line in filter(None, (*warnings(document), noise(document))):
        yield f'<p class="note">{escape(line)}</p>'
    speeds, committed = cards(document)
    first = next(iter(document["arms"]))
    yield f"<h2>Tokens per second (speedup over {escape(first)})</h2>"
    yield _table(speeds, n_left=1)
    if len(committed) > 1:
        yield "<h2>Committed tokens per step</h2>"
        yield _table(committed, n_left=1)
    yield from _speed_plots(document)
    yield from _acceptance_plots(document)
    yield from _width_plots(document)
    yield "<h2>Everything measured</h2>"
    yield _table(_details(document), n_left=2, kind="small")
    yield from _provenance(document)


def _conditions(document: Mapping[str, Any]) -> str:
    return (
        f"Up to {document['max_new_tokens']} new tokens, temperature {document['temperature']:g}, thinking "
        f"{'on' if document['thinking'] else 'off'}. Medians of {document['repeats']} interleaved repeats; spreads are "
        f"min to max. End to end: prefill is included. Arms are {document['arms_are']}."
    )


def _speed_plots(document: Mapping[str, Any]) -> Iterator[str]:
    names, first = list(document["arms"]), next(iter(document["arms"]))
    plots = []
    for task, lines in _by_task(document["summary"]):
        ticks = {float(i): str(c) for i, c in enumerate(sorted({line["concurrency"] for line in lines}))}
        for what, title, level in (("tokens_per_s", "tokens per second", None), (f"over_{first}", "speedup", 1.0)):
            drawn = [
                Line(name, _colour(names, name), points)
                for name in names
                if (points := _points([line for line in lines if line["arm"] == name], what, ticks))
            ]
            if drawn:
                axes = ("requests in flight", title if level is None else f"x {first}")
                plots.append(line_plot(f"{task}: {title}", drawn, x_ticks=ticks, axes=axes, level=level))
    yield "<h2>Speed over concurrency</h2>"
    yield key([(name, f"var(--c{_colour(names, name)})", False) for name in names])
    yield f'<div class="plots">{"".join(plots)}</div>'


def _points(lines: Sequence[Row], what: str, ticks: Mapping[float, str]) -> list[Point]:
    place = {label: x for x, label in ticks.items()}
    told = [(place[str(line["concurrency"])], line[what]) for line in lines if what in line]
    return [Point(x, value["median"], value["low"], value["high"]) for x, value in told]


def _acceptance_plots(document: Mapping[str, Any]) -> Iterator[str]:
    names, plots = list(document["arms"]), []
    for task, lines in _by_task(document["summary"]):
        counts = sorted({line["concurrency"] for line in lines})
        drawn = [
            Line(
                f"{line['arm']}, {line['concurrency']} in flight",
                _colour(names, line["arm"]),
                [Point(i, share, share, share) for i, share in enumerate(line["acceptance_by_position"], start=1)],
                dashed=line["concurrency"] != counts[0],
            )
            for line in lines
            if line["acceptance_by_position"] and line["concurrency"] in (counts[0], counts[-1])
        ]
        if drawn:
            longest = max(len(line.points) for line in drawn)
            ticks = {float(i): str(i) for i in range(1, longest + 1)}
            plots.append(line_plot(task, drawn, x_ticks=ticks, axes=("draft", "share of steps"), level=1.0))
    yield "<h2>Acceptance by position</h2>"
    if not plots:
        yield "<p>No server told it: SGLang does with every answer, vLLM in its metrics, under speculation.</p>"
        return
    yield "<p>The share of steps whose 1st, 2nd, … draft was accepted; one that was not verified was not accepted.</p>"
    told = [
        name for name in names if any(x["arm"] == name and x["acceptance_by_position"] for x in document["summary"])
    ]
    least, most = (limit(line["concurrency"] for line in document["summary"]) for limit in (min, max))
    entries = [(f"{name}, {least} in flight", f"var(--c{_colour(names, name)})", False) for name in told]
    if most != least:
        entries += [(f"{name}, {most} in flight", f"var(--c{_colour(names, name)})", True) for name in told]
    yield key(entries)
    yield f'<div class="plots">{"".join(plots)}</div>'


def _width_plots(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Width over time</h2>"
    if not document["widths"]:
        yield "<p>No server told it: ours does, in /server_info.</p>"
        return
    yield "<p>How many tokens of a block were verified: shares of the steps, over the time this arm was measured.</p>"
    for arm in dict.fromkeys(turn["arm"] for turn in document["widths"]):
        bars = [
            Bar(
                turn["wall_s"],
                {int(width): n / sum(turn["n_steps"].values()) for width, n in turn["n_steps"].items()},
                turn["task"],
                str(turn["concurrency"]),
            )
            for turn in document["widths"]
            if turn["arm"] == arm and turn["n_steps"]
        ]
        if bars:
            yield key([(f"width {width}", f"var(--w{shade})", False) for width, shade in shades(bars).items()])
            yield share_plot(f"{arm}, by requests in flight", bars, axes=("seconds", "share of steps"))


def _details(document: Mapping[str, Any]) -> list[list[str]]:
    over = compared_with(document["summary"], document["arms"])
    head = ["task", "arm", "in flight", "tok/s", *(f"x {name}" for name in over), "committed per step"]
    rows = [[*head, "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "answers equal"]]
    for line in lines_of(document):
        rows.append(
            [
                line["task"],
                line["arm"],
                str(line["concurrency"]),
                shown(line["tokens_per_s"], 0),
                *(shown(line.get(f"over_{name}"), 2) for name in over),
                number(line["committed_per_step"], 2),
                *(percentiles(line[kind], 1) for kind in ("ttft_ms", "tpot_ms")),
                equal(line),
            ]
        )
    return rows


def _provenance(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Arms</h2>"
    for name, about in document["arms"].items():
        told = "\n".join(f"{field}: {value}" for field, value in about.items() if value)
        yield f"<details open><summary>{escape(name)}</summary><pre>{escape(told)}</pre></details>"
    yield "<h2>Prompts</h2>"
    yield "<p>The same bytes in every arm; here the first of each set.</p>"
    for task in document["tasks"]:
        text = _prompt(task["first"])
        title = f"{task['task']}: {task['n']} prompts of {task['source']} (sha256 {task['sha256'][:16]}…)"
        yield f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
    yield f"<h2>Method</h2><p>{escape(document['method'])}</p>"
    environment = "".join(f"{name}={value} " for name, value in document["environment"].items())
    yield f"<pre>{escape(environment + document['command'])}</pre>"


def _prompt(prompt: Sequence[Any]) -> str:
    if isinstance(prompt[0], int):
        return f"token ids {', '.join(map(str, prompt))}"
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _by_task(summary: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for task, lines in groupby(summary, key=lambda line: line["task"]):
        yield task, list(lines)


def _colour(names: Sequence[str], name: str) -> int:
    return names.index(name) % 6


def _table(rows: Sequence[Sequence[str]], *, n_left: int, kind: str = "") -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        marks = (' class="left"' if i < n_left else "" for i in range(len(row)))
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    head, *body = rows
    lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in body)
    table = f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="wide {kind}">{table}</div>'
