"""The serving benchmark's document and its table."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from launch.tiny import Arm
from sglang_dflash.bench import machine, rows
from sglang_dflash.bench.measure import Run
from sglang_dflash.bench.prompts import BUNDLED
from sglang_dflash.bench.report import lines_table
from sglang_dflash.bench.rows import head, inherited, portable
from sglang_dflash.bench.server import Server

OVER = (Arm.OFF, Arm.STOCK, Arm.SNAPSHOT)
METHOD = (
    "Greedy. tokens_per_s: generated tokens over the time from the first request sent to the last answer received, "
    "unstreamed, prefill included. ttft and tpot: from separate streamed runs, percentiles over all requests of all "
    "repeats. committed_per_step: accepted drafts + 1 bonus, mean over verify steps. Arms are interleaved: in each "
    "repeat every arm answers all prompts at every concurrency, a few at a time, and then the next arm has its turn, "
    "in a rotating order. Servers that are not being measured are paused or stopped. The prefix cache is flushed "
    "before every turn. Ratios are taken repeat by repeat. Spreads are min and max over repeats. other_cores: CPU that "
    "processes other than the measured server and the client used meanwhile."
)


def row(arm: Arm, concurrency: int, repeat: int, speed: Run, latency: Run | None) -> rows.Row:
    """One repeat of one arm at one concurrency."""
    return rows.row({"arm": str(arm), "concurrency": concurrency, "repeat": repeat}, speed, latency)


def summarise(measured: Sequence[rows.Row]) -> list[rows.Row]:
    return rows.summarise(measured, place=["concurrency"], arms=list(Arm), over=OVER)


def document(
    servers: Mapping[Arm, Server],
    prompts: Sequence[Sequence[int]],
    measured: Sequence[rows.Row],
    options: argparse.Namespace,
    *,
    n_ties: int,
    command: str,
) -> dict[str, Any]:
    return {
        **head("serve", command),
        "method": METHOD,
        "one_at_a_time": options.one_at_a_time,
        "target": portable(str(options.target)),
        "draft": portable(str(options.draft)),
        "prompts": {
            "source": portable(str(options.data or BUNDLED)),
            "n": len(prompts),
            "n_tokens": sum(map(len, prompts)),
            "thinking": not options.no_thinking,
            "max_new_tokens": options.max_new_tokens,
        },
        "gate": {"equal": True, "tie_gap": options.tie_gap, "n_near_ties": n_ties},
        "servers": {
            arm: {"command": portable(shlex.join(server.command)), "env": inherited() | server.env}
            for arm, server in servers.items()
        },
        "summary": summarise(measured),
        "rows": list(measured),
    }


def table(document: dict[str, Any]) -> Table:
    what = document["prompts"]
    repeats = 1 + max(row["repeat"] for row in document["rows"])
    return lines_table(
        document,
        over=OVER,
        caption=f"{what['n']} prompts, up to {what['max_new_tokens']} new tokens, greedy; median (min–max) of "
        f"{repeats} interleaved repeats; prefix cache flushed before every run; answers equal in all arms.",
    )


def file_name(benchmark: str = "") -> str:
    """Of a document under `launch/results/`: when, where and on which code it was measured, and what."""
    parts = (f"{datetime.now(UTC):%Y-%m-%d}", machine.kind(), machine.commit(), benchmark)
    return "-".join(part for part in parts if part) + ".json"
