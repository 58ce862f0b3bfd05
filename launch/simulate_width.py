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
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from launch import plot_width, tiny
from launch.published import (
    BLOCK,
    CARDS,
    CONCURRENCIES,
    QWEN35_27B,
    Card,
    Task,
    acceptance_curve,
    committed,
    published_seconds,
    shared_seconds,
    step_seconds,
)  # fmt: skip
from launch.replay_width import NEAR, SETTLED, WIDTHS, Replay, Text, followed, histogram, pooled, replay, static
from sglang_dflash.bench import machine
from sglang_dflash.bench.rows import portable, write
from sglang_dflash.width import policy
from sglang_dflash.width.cost import StepCost

RESULTS = tiny.ROOT / "launch" / "results"
DRAFT_SHARES = 0.05, 0.10  # tried beside 0
LAUNCHES = "own", "shared"  # what the policy believes of costs when it starts
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
    "Acceptances and step times reach the policy one step late. Step times vary by 5 %. Answers have 256 to 4096 "
    "tokens; who is done makes way for a new request. Every run starts knowing nothing of acceptance.",
    "The policy's throughput: expected tokens of the widths it chose over their expected time. The luck of the draws "
    "enters through what the policy learns only. A static width's is exact, for the same tokens of each kind of text.",
)

# ------------------------------------------------------------------------------------------------ the published points


def believed_costs(seconds_CW: np.ndarray) -> StepCost:
    return StepCost(WIDTHS, dict(zip(CONCURRENCIES, seconds_CW, strict=True)))


def point(card: Card, task: Task, c: int, steps: int, seeds: int) -> dict[str, Any]:
    """One task at one concurrency: the policy against what the card publishes."""
    n, better, known_C3 = CONCURRENCIES[c], task.better[c], published_seconds(task)
    text = Text(acceptance_curve(task.narrow_length, task.block_length)[None])
    own_CW = step_seconds(known_C3, WIDTHS)

    def run(seconds_W: np.ndarray, launch_CW: np.ndarray) -> list[Replay]:
        return [
            replay(text, seconds_W, believed_costs(launch_CW), n, ends=lambda step, _: step >= steps, seed=seed)
            for seed in range(seeds)
        ]

    row: dict[str, Any] = {
        "card": card.name,
        "task": task.name,
        "concurrency": n,
        "published": {"off": task.off[c], "block_8": task.narrow[c], "block_16": task.block[c]},
    }
    static_W = static(text, own_CW[c], n, np.ones(1))
    row["static"] = {str(width): round(rate, 1) for width, rate in zip(WIDTHS, static_W.tolist(), strict=True)}
    for launch, launch_CW in (("own", own_CW), ("shared", step_seconds(shared_seconds(card), WIDTHS))):
        runs = run(own_CW[c], launch_CW)
        row[launch] = {
            "tokens_per_s": round(pooled(runs), 1),
            "over_better": round(pooled(runs) / better, 4),
            "over_better_lowest_seed": round(min(one.tokens_per_s for one in runs) / better, 4),
            "over_best_static": round(pooled(runs) / float(static_W.max()), 4),
            "over_off": round(pooled(runs) / task.off[c], 4),
            "widths": histogram(runs),
        }
    row["over_better_by_draft_share"] = {
        str(share): round(pooled(run(share_CW[c], share_CW)) / better, 4)
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


# ------------------------------------------------------------------------------------------------------ made-up text

EASY, MIDDLING, HOPELESS = range(3)
CURVES_KD = np.array(
    [
        *(acceptance_curve(QWEN35_27B.tasks[t].narrow_length, QWEN35_27B.tasks[t].block_length) for t in (2, 4)),
        np.full(BLOCK - 1, 0.1),
    ]
)
CHANGES_AT = 2000, 3000  # tokens per place in the batch: harder from the first on, easy again from the second
ENDS_AT = 6000
TEXTS = {
    "easy": Text(CURVES_KD, lambda number, tokens: EASY),
    "middling": Text(CURVES_KD, lambda number, tokens: MIDDLING),
    "hopeless": Text(CURVES_KD, lambda number, tokens: HOPELESS),
    "every third request easy, middling, hopeless": Text(CURVES_KD, lambda number, tokens: number % 3),
    "easy, hopeless, easy": Text(CURVES_KD, lambda number, tokens: _changing(tokens, HOPELESS)),
    "easy, middling, easy": Text(CURVES_KD, lambda number, tokens: _changing(tokens, MIDDLING)),
}
KINDS = (
    f"easy and middling: {QWEN35_27B.tasks[2].name} and {QWEN35_27B.tasks[4].name} of {QWEN35_27B.name}; hopeless: "
    "every draft is accepted with probability 0.1. Costs: that card's medians. A change is of all requests at once."
)


def _changing(tokens: float, harder: int) -> int:
    return harder if CHANGES_AT[0] <= tokens < CHANGES_AT[1] else EASY


def made_up(name: str, c: int, steps: int, seeds: int) -> dict[str, Any]:
    """One text at one concurrency: the policy against every static width on the same text."""
    text, n, seconds_CW = TEXTS[name], CONCURRENCIES[c], step_seconds(shared_seconds(QWEN35_27B), WIDTHS)
    changes = name.count(",") == 2 and name.startswith("easy")

    def ends(step: int, tokens: float) -> bool:
        return tokens >= ENDS_AT if changes else step >= steps

    runs = [replay(text, seconds_CW[c], believed_costs(seconds_CW), n, ends=ends, seed=seed) for seed in range(seeds)]
    static_W = static(text, seconds_CW[c], n, sum(run.tokens_K for run in runs))
    row = {
        "text": name,
        "concurrency": n,
        "tokens_per_s": round(pooled(runs), 1),
        "static": {str(width): round(rate, 1) for width, rate in zip(WIDTHS, static_W.tolist(), strict=True)},
        "over_best_static": round(pooled(runs) / float(static_W.max()), 4),
        "over_off": round(pooled(runs) / float(static_W[0]), 4),
        "widths": histogram(runs),
    }
    if changes:
        row["steps_to_follow"] = [followed(text, seconds_CW[c], run) for run in runs]
        row["trace"] = [runs_of(runs[0].widths), runs_of(runs[0].kinds)]
    return row


def runs_of(values: Sequence[int]) -> str:
    """`16x3 1x2` for 16 16 16 1 1."""
    return " ".join(f"{value}x{sum(1 for _ in same)}" for value, same in groupby(values))


# -------------------------------------------------------------------------------------------------------- the document


def document(options: argparse.Namespace, command: str) -> dict[str, Any]:
    steps, seeds, n_costs = options.steps, options.seeds, range(len(CONCURRENCIES))
    points = [point(card, task, c, steps, seeds) for card in CARDS for task in card.tasks for c in n_costs]
    texts = [made_up(name, c, steps, seeds) for name in TEXTS for c in n_costs]
    found = [steps for row in texts for run in row.get("steps_to_follow", []) for steps in run]
    return {
        "benchmark": "simulate_width",
        "level": "P: computed",
        "when": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
        "commit": machine.commit(),
        "command": portable(command),
        "assumptions": list(ASSUMPTIONS),
        "policy": {"widths": WIDTHS, "explore": policy.EXPLORE, "memory": policy.MEMORY, "prior": policy.PRIOR},
        "steps": steps,
        "seeds": seeds,
        "summary": {launch: summary(points, launch) for launch in LAUNCHES}
        | {
            "over_better_lowest_by_draft_share": {
                str(share): min(row["over_better_by_draft_share"][str(share)] for row in points)
                for share in DRAFT_SHARES
            },
            "most_steps_to_follow": None if None in found else max(found),
            "followed": f"{SETTLED - 1} of {SETTLED} steps at widths within {NEAR:.0%} of the best throughput",
        },
        "fits": [fit(card) for card in CARDS],
        "points": points,
        "texts": KINDS,
        "made_up": texts,
    }


def tables(document: dict[str, Any]) -> str:
    """Markdown: the published points, then the made-up texts."""
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
            f"| {row['shared']['over_better']:.3f} | {_mostly(own['widths'])} |"
        )
    lines += ["", "| text | c | chosen width, tok/s | x best static | x width 1 | steps to follow | widths |"]
    lines.append("|---|---:|---:|---:|---:|---|---|")
    for row in document["made_up"]:
        followed = "; ".join(", ".join(map(str, run)) for run in row.get("steps_to_follow", []))
        lines.append(
            f"| {row['text']} | {row['concurrency']} | {row['tokens_per_s']:.0f} | {row['over_best_static']:.3f} "
            f"| {row['over_off']:.3f} | {followed} | {_mostly(row['widths'])} |"
        )
    return "\n".join(lines)


def _mostly(widths: dict[str, float]) -> str:
    """The widths of at least a twentieth of the steps."""
    return ", ".join(f"{width}: {share:.0%}" for width, share in widths.items() if share >= 0.05)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launch.simulate_width", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=1500, help="per point and seed (1500)")
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
