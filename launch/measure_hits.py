"""What a hit in the prefix cache costs a draft with a window: its ring begins empty, where the target's K/V are found.

    python -m launch.measure_hits [--window 64] [--conversations 24]      # the tiny pairs, on a CPU

A server with a window answers the second turn of conversations twice: from an empty prefix cache, and with the first
turn found there. The tokens must be the same; tokens committed per step are compared by how far into the answer a step
began. Two kinds of second turn: another question, and the rest of the first turn's answer (nothing new to read). For
comparison the same is asked of a server without a window, whose draft finds its K/V where the target does.

A table for people; a JSON document, whose path is the last line of stdout.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from launch import machine, report, tiny
from launch.bench_serve import RESULTS, held_out_questions, tokenize
from launch.server import REQUEST_TIMEOUT_S, Server, ServerError, end_on_sigterm, free_port
from launch.tiny import Arm, require_worker

ANSWER = 96
BUCKET = 16  # tokens of the answer
PAIRS = {"hybrid": (tiny.HYBRID, (*tiny.HYBRID_FLAGS, "--mamba-track-interval", "64")), "dense": (tiny.DENSE, ())}


class Turn(NamedTuple):
    tokens: list[int]
    n_cached: int
    steps: list[tuple[int, int]]  # tokens answered before a step, tokens it committed


def ask(server: Server, prompt: Sequence[int]) -> Turn:
    """The greedy answer, step by step: a stream has an event per step, which counts tokens and steps so far."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True},
        "stream": True,
    }
    counts, result = [(1, 0)], {}
    with httpx.stream(
        "POST", f"{server.url}/generate", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False
    ) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                result = json.loads(line.removeprefix("data: "))
                meta = result["meta_info"]
                counts.append((meta["completion_tokens"], meta.get("spec_verify_ct", 0)))
    steps = [
        (before, after - before)
        for (before, step), (after, next_step) in pairwise(counts)
        if next_step == step + 1 and after < ANSWER  # the last step is cut where the answer ends
    ]
    return Turn(result["output_ids"], result["meta_info"]["cached_tokens"], steps)


def measure(server: Server, prompts: list[list[int]], console: Console) -> list[dict[str, Any]]:
    """One row per kind of turn, and whether the first turn was found in the cache."""
    steps, cached = defaultdict[tuple[str, bool], list[tuple[int, int]]](list), defaultdict[str, list[int]](list)
    for first, other in track(list(zip(prompts[::2], prompts[1::2], strict=True)), server.name, console=console):
        server.flush_cache()
        answer = ask(server, first).tokens
        for kind, second in (("another question", first + answer + other), ("the rest", first + answer[: ANSWER // 2])):
            server.flush_cache()
            whole = ask(server, second)
            server.flush_cache()
            ask(server, first)
            hit = ask(server, second)
            if whole.tokens != hit.tokens or whole.n_cached:
                raise ServerError(f"{server.name}: a prefix from the cache changes the answer to {second}")
            steps[kind, False] += whole.steps
            steps[kind, True] += hit.steps
            cached[kind].append(hit.n_cached)
    return [
        {
            "server": server.name, "turn": kind, "found": found, "cached_tokens": fmean(cached[kind]) if found else 0.0,
            "committed_per_step": fmean(n for _, n in its_steps), "n_steps": len(its_steps),
            "by_tokens_answered": by_tokens_answered(its_steps),
        }
        for (kind, found), its_steps in steps.items()
    ]  # fmt: skip


def by_tokens_answered(steps: list[tuple[int, int]]) -> dict[int, float | None]:
    """Tokens committed per step that began in each stretch of the answer; None where none did."""
    curve: dict[int, float | None] = {}
    for start in range(0, ANSWER, BUCKET):
        committed = [n for at, n in steps if start <= at < start + BUCKET]
        curve[start] = fmean(committed) if committed else None
    return curve


def table(rows: list[dict[str, Any]]) -> Table:
    starts = list(rows[0]["by_tokens_answered"])
    shown = Table(title="tokens committed per step, by tokens of the answer before the step")
    for name in ("server", "second turn", "first turn", "found", *(f"{start}-" for start in starts), "all"):
        shown.add_column(name, justify="left" if name in ("server", "second turn", "first turn") else "right")
    for row in rows:
        shown.add_row(
            row["server"], row["turn"], "found" if row["found"] else "read again", f"{row['cached_tokens']:.0f}",
            *("-" if n is None else f"{n:.2f}" for n in row["by_tokens_answered"].values()),
            f"{row['committed_per_step']:.2f}",
        )  # fmt: skip
    return shown


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.measure_hits", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--targets", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    console, rows = Console(width=120), []
    for target in options.targets:
        pair, flags = PAIRS[target]
        prompts = tokenize(held_out_questions(2 * options.conversations, seed=11), pair.target, thinking=False)
        for name, window in (
            (target, ()),
            (f"{target}, window", ("--speculative-draft-window-size", str(options.window))),
        ):
            port = free_port(31800)
            command = tiny.command(Arm.PLUGIN, pair, *tiny.FLAGS, *flags, *window)
            env = tiny.ENV | tiny.environment(Arm.PLUGIN) | {"SGLANG_DFLASH_WIDTHS": "fixed"}
            with Server(command, port=port, log=tiny.RUN_DIR / f"hits-{port}.log", env=env, name=name) as server:
                require_worker(Arm.PLUGIN, server)
                rows += measure(server, prompts, console)
    console.print(table(rows))
    document = report.head("hits", shlex.join(["python", "-m", "launch.measure_hits", *arguments])) | {"rows": rows}
    name = f"{datetime.now(UTC):%Y-%m-%d}-{machine.kind()}-{machine.commit()}-hits.json"
    print(report.write(document, options.output or RESULTS / name))


if __name__ == "__main__":
    try:
        main()
    except ServerError as error:
        sys.exit(f"measure_hits: {error}")
