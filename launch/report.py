"""The serving benchmark's document: rows of measurements, the summary drawn from them, and a table of that.

Every number of the table can be recomputed from the rows. Paths of this machine are left out.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from launch import machine
from launch.measure import Run, Spread, percentile, ratios, spread
from launch.tiny import ROOT, Arm

if TYPE_CHECKING:
    from launch.bench_serve import Bench

METHOD = (
    "Greedy. tokens_per_s: generated tokens over the time from the first request sent to the last answer received, "
    "unstreamed, prefill included. ttft and tpot: from separate streamed runs, percentiles over all requests of all "
    "repeats. committed_per_step: accepted drafts + 1 bonus, mean over verify steps. Arms are interleaved: in each "
    "repeat every arm answers all prompts at every concurrency, a few at a time, and then the next arm has its turn, "
    "in a rotating order. Servers that are not being measured are paused or stopped. The prefix cache is flushed "
    "before every turn. Ratios are taken repeat by repeat. Spreads are min and max over repeats. other_cores: CPU that "
    "processes other than the measured server and the client used meanwhile."
)

# Other processes' share of the machine up to which a measurement counts as undisturbed.
QUIET = 0.05


def row(arm: Arm, concurrency: int, repeat: int, speed: Run, latency: Run) -> dict[str, Any]:
    """One repeat of one arm at one concurrency."""
    return {
        "arm": str(arm),
        "concurrency": concurrency,
        "repeat": repeat,
        "wall_s": round(speed.wall_s, 4),
        "n_tokens": speed.n_tokens,
        "tokens_per_s": round(speed.tokens_per_s, 2),
        "committed_per_step": round(speed.committed_per_step, 4),
        "other_cores": round(speed.other_cores, 3),
        "ttft_ms": [round(answer.ttft_s * 1e3, 2) for answer in latency.answers],
        "tpot_ms": [round(answer.tpot_s * 1e3, 3) for answer in latency.answers if answer.tpot_s == answer.tpot_s],
    }


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per concurrency and arm, in the order of their first rows."""
    lines = []
    for concurrency, arm in dict.fromkeys((row["concurrency"], row["arm"]) for row in rows):
        speeds = _speeds(rows, concurrency, arm)
        mine = [row for row in rows if (row["concurrency"], row["arm"]) == (concurrency, arm)]
        ttft_ms = [value for row in mine for value in row["ttft_ms"]]
        tpot_ms = [value for row in mine for value in row["tpot_ms"]]
        line = {
            "concurrency": concurrency,
            "arm": arm,
            "tokens_per_s": _rounded(spread(speeds)),
            "committed_per_step": round(spread([row["committed_per_step"] for row in mine]).median, 3),
            "ttft_ms": {"p50": percentile(ttft_ms, 50), "p99": percentile(ttft_ms, 99)},
            "tpot_ms": {"p50": percentile(tpot_ms, 50), "p99": percentile(tpot_ms, 99)},
            "other_cores_max": max(row["other_cores"] for row in mine),
        }
        for other in (Arm.OFF, Arm.STOCK):
            theirs = _speeds(rows, concurrency, other)
            if theirs and arm != other:
                line[f"over_{other}"] = _rounded(ratios(speeds, theirs))
        lines.append(line)
    return sorted(lines, key=lambda line: (line["concurrency"], list(Arm).index(Arm(line["arm"]))))


def head(benchmark: str, command: str) -> dict[str, Any]:
    """What every measured document begins with: what it is, how far it proves something, and where it was seen."""
    gpus = machine.gpus()
    return {
        "benchmark": benchmark,
        "level": f"G: seen on {gpus[0].split(',')[0]}" if gpus else "C: seen on CPU",
        "when": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
        "commit": machine.commit(),
        "command": portable(command),
        "machine": machine.describe(),
        "versions": machine.versions(),
    }


def document(bench: "Bench", rows: Sequence[dict[str, Any]], *, command: str) -> dict[str, Any]:
    options = bench.options
    return {
        **head("serve", command),
        "method": METHOD,
        "one_at_a_time": options.one_at_a_time,
        "target": portable(str(options.target)),
        "draft": portable(str(options.draft)),
        "prompts": {
            "source": portable(str(options.data or "held-out questions of the tiny corpus")),
            "n": len(bench.prompts),
            "n_tokens": sum(map(len, bench.prompts)),
            "thinking": not options.no_thinking,
            "max_new_tokens": options.max_new_tokens,
        },
        "gate": {"equal": True, "tie_gap": options.tie_gap, "n_near_ties": bench.n_ties},
        "servers": {
            arm: {"command": portable(shlex.join(server.command)), "env": inherited() | server.env}
            for arm, server in bench.servers.items()
        },
        "summary": summarise(rows),
        "rows": list(rows),
    }


def table(document: dict[str, Any]) -> Table:
    where, what = document["machine"], document["prompts"]
    device = " + ".join(where["gpus"]) or where["cpu"]
    repeats = 1 + max(row["repeat"] for row in document["rows"])
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{device}, {where['cores']} cores, SGLang {document['versions']['sglang']}, commit {document['commit']}",
        caption=f"{what['n']} prompts, up to {what['max_new_tokens']} new tokens, greedy; median (min–max) of "
        f"{repeats} interleaved repeats; prefix cache flushed before every run; answers equal in all arms.",
    )
    latencies = "TTFT ms\np50 / p99", "TPOT ms\np50 / p99"
    for name in ("c", "arm", "tok/s", "x off", "x stock", "committed\nper step", *latencies):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for line in document["summary"]:
        table.add_row(
            str(line["concurrency"]),
            line["arm"],
            _shown(line["tokens_per_s"], 0),
            _shown(line.get("over_off"), 2),
            _shown(line.get("over_stock"), 2),
            f"{line['committed_per_step']:.2f}",
            f"{line['ttft_ms']['p50']:.0f} / {line['ttft_ms']['p99']:.0f}",
            f"{line['tpot_ms']['p50']:.1f} / {line['tpot_ms']['p99']:.1f}",
        )
    return table


def noise(document: dict[str, Any]) -> str:
    """One sentence when other processes were busy while arms were measured, else nothing."""
    busiest, cores = max(row["other_cores"] for row in document["rows"]), document["machine"]["cores"]
    if busiest <= QUIET * cores:
        return ""
    return f"Not a quiet machine: others kept up to {busiest:.1f} of {cores} cores busy, so do not quote these numbers."


def write(document: dict[str, Any], path: Path) -> str:
    """Save the document; returns the path as people write it from the repository."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return str(path).removeprefix(f"{ROOT}/")


def file_name(benchmark: str = "") -> str:
    """Of a document under `launch/results/`: when, where and on which code it was measured, and what."""
    parts = (f"{datetime.now(UTC):%Y-%m-%d}", machine.kind(), machine.commit(), benchmark)
    return "-".join(part for part in parts if part) + ".json"


def portable(text: str) -> str:
    """`text` with paths as seen from the repository; of a path outside it, the last part."""
    text = text.replace(sys.executable, "python").replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w.])(?:/[\w.@+-]+)*/([\w.@+-]+)", r"\1", text)


def inherited() -> dict[str, str]:
    """What this program's own environment tells a server."""
    return {k: v for k, v in os.environ.items() if k.startswith(("SGLANG_", "OMP_", "CUDA_VISIBLE_DEVICES"))}


def _speeds(rows: Sequence[dict[str, Any]], concurrency: int, arm: str) -> list[float]:
    """Tokens per second by repeat."""
    mine = [row for row in rows if (row["concurrency"], row["arm"]) == (concurrency, arm)]
    return [row["tokens_per_s"] for row in sorted(mine, key=lambda row: row["repeat"])]


def _rounded(value: Spread) -> dict[str, float]:
    return {name: round(number, 3) for name, number in value._asdict().items()}


def _shown(value: dict[str, float] | None, digits: int) -> str:
    if value is None:
        return ""
    return f"{value['median']:.{digits}f} ({value['low']:.{digits}f}–{value['high']:.{digits}f})"
