"""What choosing the width does at the points two model cards publish, computed with the policy that serves.

    python -m launch.simulate_width

Nothing is served and no GPU is used: acceptances are drawn from curves fitted to the published acceptance lengths,
step times come from the published throughputs, and `sglang_dflash.width.policy` decides as in a server, one step late.
What is assumed, and what the fits leave over, is part of the JSON document under `launch/results/`, beside a plot.
Prints Markdown tables; the last line of stdout is the document's path.
"""

import argparse
import shlex
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np

from launch import plot_width
from launch.published import (
    CARDS,
    CONCURRENCIES,
    Card,
    Task,
    acceptance_curve,
    committed,
    published_seconds,
    shared_seconds,
    step_seconds,
)  # fmt: skip
from launch.width_replay import WIDTHS, Run, mostly, pooled, replay, shares
from sglang_dflash.servers import machine
from sglang_dflash.servers.document import portable, write
from sglang_dflash.tiny import pairs as tiny
from sglang_dflash.width import policy
from sglang_dflash.width.chooser import Chooser
from sglang_dflash.width.cost import StepCost
from sglang_dflash.width.policy import Adaptive

RESULTS = tiny.ROOT / "launch" / "results"
DRAFT_SHARES = 0.05, 0.10  # tried beside 0
LAUNCHES = "own", "shared"  # what the policy believes of costs when it starts
ANSWER_TOKENS = 256, 4096  # lengths of answers, drawn evenly between
ASSUMPTIONS = (
    "Level P: computed. Nothing here was measured by us.",
    "Seconds per step at widths 1, 8 and 16: concurrency x acceptance length / published tokens per second (length 1 "
    "without speculation). Prefill, and the end of a run when fewer requests are left, are inside.",
    "Between widths 8 and 16 they are linear. Between 1 and 8 they are the higher of the line from 1 to 8 and of the "
    "line through 8 and 16, as drafting costs the same from width 2 on. The stairs of a GPU's cost are not published. "
    "Width 1 costs what AR does: that it keeps features for the next draft is not charged.",
    "Acceptance: the logit is linear in the position, with the two parameters that give the published lengths at 8 and "
    "16, which are means over concurrencies. Requests of a task are alike, and positions independent.",
    "The column for block 8 is of a draft that drafts 8. Read as the first 8 of a drafted block of 16, it assumes that "
    "they are accepted as often, and that drafting 16 takes no longer than drafting 8. `draft_share` mends the second: "
    "the part of what a step at 16 takes longer than a narrower one that is drafting, and is not saved.",
    "launch `own`: the policy starts from the step times of the task itself. launch `shared`: it starts from the "
    "medians over the card's tasks, and has only real steps to correct them. Its residuals are `residual_percent`.",
    "Acceptances and step times reach the policy one step late. Step times vary by 5 %, and one in a hundred is twice "
    "as long. Answers have 256 to 4096 tokens; one that is done makes way for a new request. Every run starts knowing "
    "nothing of acceptance.",
    "The policy's throughput: expected tokens of the widths it chose over their expected time. The luck of the draws "
    "enters through what the policy learns only. A static width's is exact.",
)


class Drawn:
    """A request whose drafts are accepted by chance, each position for itself."""

    def __init__(self, rid: str, curve_D: np.ndarray, random: np.random.Generator) -> None:
        self.rid, self.random, self.n_left = rid, random, random.integers(*ANSWER_TOKENS)
        self.fails_D = (1 - curve_D.cumprod()).tolist()  # the probability that drafts up to this one fail
        self.committed_N = committed(curve_D).tolist()

    def step(self, width: int) -> tuple[int, float]:
        """Tokens count as expected: the luck of the draws is left out."""
        n_accepted = min(bisect_left(self.fails_D, self.random.random()), width - 1)
        self.n_left -= n_accepted + 1
        return n_accepted, self.committed_N[width - 1]

    def is_done(self) -> bool:
        return self.n_left <= 0


def simulate(
    curve_D: np.ndarray, seconds_CW: np.ndarray, believed_CW: np.ndarray, c: int, *, tokens: int, seed: int
) -> Run:
    """At one concurrency, until `tokens` are committed per place in the batch; steps take `seconds_CW`."""
    random, n = np.random.default_rng(seed), CONCURRENCIES[c]
    requests: Iterator[Drawn] = (Drawn(f"request-{number}", curve_D, random) for number in count())
    believed = StepCost(WIDTHS, dict(zip(CONCURRENCIES, believed_CW, strict=True)), lambda seconds_SW: None)
    seconds = dict(zip(WIDTHS, seconds_CW[c].tolist(), strict=True))
    return replay(Chooser(Adaptive(WIDTHS, believed)), seconds, requests, n, n * tokens, seed=seed)


def point(card: Card, task: Task, c: int, tokens: int, seeds: int) -> dict[str, Any]:
    """One task at one concurrency: the policy against what the card publishes."""
    better, known_C3 = task.better[c], published_seconds(task)
    curve_D, own_CW = acceptance_curve(task.narrow_length, task.block_length), step_seconds(known_C3, WIDTHS)
    static_W = CONCURRENCIES[c] * committed(curve_D)[np.array(WIDTHS) - 1] / own_CW[c]

    def run(seconds_CW: np.ndarray, launch_CW: np.ndarray) -> list[Run]:
        return [simulate(curve_D, seconds_CW, launch_CW, c, tokens=tokens, seed=seed) for seed in range(seeds)]

    row: dict[str, Any] = {
        "card": card.name,
        "task": task.name,
        "concurrency": CONCURRENCIES[c],
        "published": {"off": task.off[c], "block_8": task.narrow[c], "block_16": task.block[c]},
        "static": {str(width): round(rate, 1) for width, rate in zip(WIDTHS, static_W.tolist(), strict=True)},
    }
    for launch, launch_CW in (("own", own_CW), ("shared", step_seconds(shared_seconds(card), WIDTHS))):
        runs = run(own_CW, launch_CW)
        row[launch] = {
            "tokens_per_s": round(pooled(runs), 1),
            "over_better": round(pooled(runs) / better, 4),
            "over_better_lowest_seed": round(min(pooled([one]) for one in runs) / better, 4),
            "over_best_static": round(pooled(runs) / float(static_W.max()), 4),
            "over_off": round(pooled(runs) / task.off[c], 4),
            "widths": shares(runs),
        }
    row["over_better_by_draft_share"] = {
        str(share): round(pooled(run(share_CW, share_CW)) / better, 4)
        for share in DRAFT_SHARES
        for share_CW in (step_seconds(known_C3, WIDTHS, share),)
    }
    return row


def fit(card: Card) -> dict[str, Any]:
    """The curves and costs of a card, and how far each task is from what the tasks share."""
    shared_C3 = shared_seconds(card)
    tasks = {}
    for task in card.tasks:
        curve_D, known_C3 = acceptance_curve(task.narrow_length, task.block_length), published_seconds(task)
        tasks[task.name] = {
            "conditional_acceptance": curve_D.round(4).tolist(),
            "committed": committed(curve_D).round(3).tolist(),
            "step_ms": _by_concurrency(1e3 * step_seconds(known_C3, WIDTHS), 3),
            "residual_percent": _by_concurrency(100 * (known_C3 / shared_C3 - 1), 1),
        }
    shared = _by_concurrency(1e3 * step_seconds(shared_C3, WIDTHS), 3)
    return {"card": card.name, "source": card.tables, "shared_step_ms": shared, "tasks": tasks}


def _by_concurrency(values_CX: np.ndarray, digits: int) -> dict[str, list[float]]:
    return {str(n): row for n, row in zip(CONCURRENCIES, values_CX.round(digits).tolist(), strict=True)}


def summary(points: Sequence[dict[str, Any]], launch: str) -> dict[str, Any]:
    """Where the policy is lowest, and its means over concurrencies, a task at a time and all of them together."""
    lowest = min(points, key=lambda row: row[launch]["over_better"])
    means = {
        f"{card} {task}": [round(mean, 4) for mean in over_means(rows, launch)]
        for (card, task), group in groupby(points, key=lambda row: (row["card"], row["task"]))
        for rows in (list(group),)
    }
    overall = [over_means(list(rows), launch) for _, rows in groupby(points, key=lambda row: row["card"])]
    return {
        "over_better_lowest": lowest[launch]["over_better"],
        "over_better_lowest_at": f"{lowest['card']} {lowest['task']} at {lowest['concurrency']}",
        "over_better_lowest_seed": min(row[launch]["over_better_lowest_seed"] for row in points),
        "over_better_mean": round(float(np.mean([row[launch]["over_better"] for row in points])), 4),
        "over_best_static_mean": round(float(np.mean([row[launch]["over_best_static"] for row in points])), 4),
        "over_off_lowest": min(row[launch]["over_off"] for row in points),
        "mean_over_concurrencies_over_block_8_and_16": means,
        "mean_of_card_over_block_8_and_16": np.round(overall, 4).tolist(),
        "tasks_with_mean_below_a_column": [name for name, ratios in means.items() if min(ratios) < 1],
    }


def over_means(rows: Sequence[dict[str, Any]], launch: str) -> tuple[float, float]:
    """The policy's mean throughput over those of blocks 8 and 16."""
    mine = sum(row[launch]["tokens_per_s"] for row in rows)
    narrow, block = (sum(row["published"][name] for row in rows) for name in ("block_8", "block_16"))
    return mine / narrow, mine / block


def document(options: argparse.Namespace, command: str) -> dict[str, Any]:
    tokens, seeds, n_costs = options.tokens, options.seeds, range(len(CONCURRENCIES))
    points = [point(card, task, c, tokens, seeds) for card in CARDS for task in card.tasks for c in n_costs]
    return {
        "benchmark": "simulate_width",
        "level": "P: computed",
        "when": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
        "commit": machine.commit(),
        "command": portable(command),
        "assumptions": list(ASSUMPTIONS),
        "policy": {"widths": WIDTHS, "explore": policy.EXPLORE, "keep": policy.KEEP, "prior": policy.PRIOR},
        "tokens": tokens,
        "seeds": seeds,
        "summary": {launch: summary(points, launch) for launch in LAUNCHES}
        | {
            "over_better_lowest_by_draft_share": {
                str(share): min(row["over_better_by_draft_share"][str(share)] for row in points)
                for share in DRAFT_SHARES
            }
        },
        "fits": [fit(card) for card in CARDS],
        "points": points,
    }


def tables(document: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "Computed (level P) from the published numbers; x: the chosen width over the better column, over AR.", "",
        "| card | task | c | AR | block 8 | block 16 | chosen | x better | x AR | costs shared: x better | widths |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]  # fmt: skip
    for row in document["points"]:
        told, own = row["published"], row["own"]
        lines.append(
            f"| {row['card']} | {row['task']} | {row['concurrency']} | {told['off']} | {told['block_8']} "
            f"| {told['block_16']} | {own['tokens_per_s']:.0f} | {own['over_better']:.3f} | {own['over_off']:.2f} "
            f"| {row['shared']['over_better']:.3f} | {mostly(own['widths'])} |"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launch.simulate_width", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8000, help="of each run, per place in the batch (8000)")
    parser.add_argument("--seeds", type=int, default=3, help="runs per point (3)")
    parser.add_argument("--output", type=Path, help="the JSON file (launch/results/<date>-computed-width.json)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    options = parse(arguments)
    computed = document(options, shlex.join(["python", "-m", "launch.simulate_width", *arguments]))
    path = options.output or RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-computed-width.json"
    print(tables(computed))
    written = write(computed, path)
    plot_width.plot(computed, path.with_suffix(".png"))
    print(written)


if __name__ == "__main__":
    main()
