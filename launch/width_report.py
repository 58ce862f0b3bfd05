"""The width benchmark's document: rows of measurements, the summary drawn from them, claims, and a Markdown table.

Every number of the table can be recomputed from the rows and steps. Paths of this machine are left out.
"""

import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from launch.width_workloads import Workload
from sglang_dflash.bench.measure import Run, ratios, spread
from sglang_dflash.bench.rows import head, inherited, portable, rounded, shown
from sglang_dflash.bench.server import Server

OFF, AUTO = "off", "auto"
STATIC = ("1", "4", "8", "16")  # arms that verify always the same number of tokens
BOUND = 0.97  # of what is compared with, at least
USUAL = 0.1  # a width of at least this share of the steps is one the policy has settled on; looks are rarer
SETTLED = 10  # steps in a row, all but one at such a width, with which the policy has followed
PHASES = ("easy", "hopeless", "easy again")
METHOD = (
    "Greedy, tiny pair, fp32. tokens_per_s: generated tokens over the time from the first request sent to the last "
    "answer received, prefill included. Each repeat has servers of its own, for two processes started alike differ in"
    " speed. Arms are interleaved: every arm answers every workload at every concurrency, a few prompts at a time, "
    "and then the next arm has its turn, in a rotating order; servers that are not being measured are paused; the "
    "prefix cache is flushed before every turn, and a short unmeasured run of the same workload precedes it. Before "
    "all that the server that chooses answered everything once: it starts with costs and beliefs from all workloads, "
    "and each turn's first steps come after a few of its own kind; what a change costs is in `changing`. All but "
    "off write their steps to a file. The best static width is that of the highest median in its row; "
    "ratios are taken repeat by repeat; spreads are min and max over repeats. other_cores: CPU that processes other "
    "than the measured server and the client used meanwhile. changing: easy, hopeless, easy texts in one stream. A "
    "width is usual in a phase if it "
    f"is that of {USUAL:.0%} of the steps in the second half of the phase's own steps (no other phase's request in "
    f"them); the policy has followed when {SETTLED} steps in a row, all but one, are at usual widths."
)


class Step(NamedTuple):
    """One line of `SGLANG_DFLASH_WIDTH_TRACE`."""

    s: float  # when its outcome was known
    width: int
    accepted: dict[str, int]  # by request


def row(arm: str, workload: str, concurrency: int, repeat: int, run: Run, steps: Sequence[Step]) -> dict[str, Any]:
    """One repeat of one arm; `steps` of `off`: none."""
    return {
        "arm": arm,
        "workload": workload,
        "concurrency": concurrency,
        "repeat": repeat,
        "wall_s": round(run.wall_s, 4),
        "n_tokens": run.n_tokens,
        "tokens_per_s": round(run.tokens_per_s, 2),
        "committed_per_step": round(run.committed_per_step, 4),
        "other_cores": round(run.other_cores, 3),
        "widths": dict(sorted(Counter(step.width for step in steps).items())),
    }


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per workload and concurrency, in the order of their first rows."""
    lines = []
    for workload, concurrency in dict.fromkeys((row["workload"], row["concurrency"]) for row in rows):
        mine = [row for row in rows if (row["workload"], row["concurrency"]) == (workload, concurrency)]
        speeds = {arm: _of(mine, arm, "tokens_per_s") for arm in (OFF, *STATIC, AUTO)}
        best = max(STATIC, key=lambda arm: statistics.median(speeds[arm]))
        widths = sum((Counter(row["widths"]) for row in mine if row["arm"] == AUTO), Counter[int]())
        lines.append(
            {
                "workload": workload,
                "concurrency": concurrency,
                "tokens_per_s": {arm: rounded(spread(values)) for arm, values in speeds.items()},
                "committed_per_step": {
                    arm: round(statistics.median(_of(mine, arm, "committed_per_step")), 3) for arm in speeds
                },
                "best_static": best,
                "auto_over_best": rounded(ratios(speeds[AUTO], speeds[best])),
                "auto_over_off": rounded(ratios(speeds[AUTO], speeds[OFF])),
                "widths": {width: round(n / widths.total(), 3) for width, n in sorted(widths.items())},
                "other_cores_max": max(row["other_cores"] for row in mine),
            }
        )
    return lines


def means(summary: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By arm: the mean over the easy workload's concurrencies of its median tokens per second."""
    easy = [line for line in summary if line["workload"] == "easy"]
    return {
        arm: round(statistics.mean(line["tokens_per_s"][arm]["median"] for line in easy), 2)
        for arm in (OFF, *STATIC, AUTO)
    }


def claims(summary: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be shown, and whether it was."""
    found: list[dict[str, Any]] = []

    def claim(text: str, value: float, bound: float) -> None:
        found.append({"claim": text, "value": round(value, 4), "bound": bound, "holds": value >= bound})

    for line in summary:
        where = f"{line['workload']} at {line['concurrency']}"
        if line["workload"] == "easy":
            claim(f"{where}: chosen over the best static width", line["auto_over_best"]["median"], BOUND)
        else:
            claim(f"{where}: chosen over off", line["auto_over_off"]["median"], BOUND)
    mean = means(summary)
    for arm in STATIC:
        claim(f"easy, mean over concurrencies: chosen over always {arm}", mean[AUTO] / mean[arm], 1.0)
    return found


# ----------------------------------------------------------------------------------------------- a text that changes


def phases(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """For each phase where it begins and ends, its usual widths, and after how many steps the policy had followed.

    A request's name begins with its phase's number. A phase's own steps are those of its requests alone; before them,
    and not counted, are some with requests of two phases.
    """
    found = []
    for phase, name in enumerate(PHASES):
        own = [i for i, step in enumerate(steps) if all(rid.startswith(f"{phase}-") for rid in step.accepted)]
        widths = [steps[i].width for i in own]
        usual = usual_widths(widths)
        found.append(
            {
                "phase": name,
                "first_step": own[0] if own else None,
                "n_steps": len(own),
                "usual_widths": usual,
                "followed_after": followed_after(widths, usual),
            }
        )
    return found


def usual_widths(widths: Sequence[int]) -> list[int]:
    later = widths[len(widths) // 2 :]
    return [width for width, n in sorted(Counter(later).items()) if n >= USUAL * len(later)]


def followed_after(widths: Sequence[int], usual: Sequence[int]) -> int | None:
    """Steps before the first usual one that begins `SETTLED` in a row, all but one usual; None: there are none such."""
    for i in range(len(widths) - SETTLED + 1):
        if widths[i] in usual and sum(width not in usual for width in widths[i : i + SETTLED]) <= 1:
            return i
    return None


# ------------------------------------------------------------------------------------------------------- the document


def document(
    servers: Mapping[str, Server],
    workloads: Sequence[Workload],
    rows: Sequence[dict[str, Any]],
    steps: Sequence[Step],
    *,
    change_concurrency: int,
    command: str,
) -> dict[str, Any]:
    summary = summarise(rows)
    return {
        **head("width", command),
        "method": METHOD,
        "workloads": {
            workload.name: {
                "source": workload.source,
                "n": len(workload.prompts),
                "n_tokens": sum(map(len, workload.prompts)),
                "sampling": dict(workload.sampling),
                "prompts_by_concurrency": {c: len(workload.at(c)) for c in workload.concurrency},
            }
            for workload in workloads
        },
        "servers": {
            arm: {"command": portable(shlex.join(server.command)), "env": _portable_env(inherited() | server.env)}
            for arm, server in servers.items()
        },
        "claims": claims(summary),
        "summary": summary,
        "means": means(summary),
        "rows": list(rows),
        "changing": {
            "concurrency": change_concurrency,
            "phases": phases(steps),
            "widths": [step.width for step in steps],
            "requests": [len(step.accepted) for step in steps],
            "hopeless_requests": [sum(rid.startswith("1-") for rid in step.accepted) for step in steps],
            "accepted": [sum(step.accepted.values()) for step in steps],
        },
    }


def table(document: dict[str, Any]) -> str:
    """Markdown: speeds, the means, what was to be shown, and how the policy followed."""
    return "\n".join((*_speeds(document), "", *_claims(document), "", *_changing(document)))


def _speeds(document: dict[str, Any]) -> Iterator[str]:
    arms = (OFF, *STATIC, AUTO)
    head = ["workload", "concurrency", *arms, "chosen / best static", "chosen / off", "widths chosen"]
    yield _line(head)
    yield "|---|" + "---:|" * (len(head) - 2) + "---|"
    for line in document["summary"]:
        speeds = [shown(line["tokens_per_s"][arm], 0) for arm in arms]
        over = shown(line["auto_over_best"], 3), shown(line["auto_over_off"], 2)
        widths = ", ".join(f"{width}: {share:.0%}" for width, share in line["widths"].items() if share >= 0.005)
        yield _line([line["workload"], str(line["concurrency"]), *speeds, *over, widths])
    mean = document["means"]
    best = max(mean[arm] for arm in STATIC)
    over = f"{mean[AUTO] / best:.3f}", f"{mean[AUTO] / mean[OFF]:.2f}"
    yield _line(["easy", "mean", *(f"{mean[arm]:.0f}" for arm in arms), *over, ""])


def _claims(document: dict[str, Any]) -> Iterator[str]:
    yield "| to be shown | measured | at least | |"
    yield "|---|---:|---:|---|"
    for claim in document["claims"]:
        yield _line(
            [claim["claim"], f"{claim['value']:.3f}", f"{claim['bound']}", "yes" if claim["holds"] else "**no**"]
        )


def _changing(document: dict[str, Any]) -> Iterator[str]:
    yield "| changing | steps | usual widths | followed after |"
    yield "|---|---:|---|---:|"
    for phase in document["changing"]["phases"]:
        after = "never" if phase["followed_after"] is None else f"{phase['followed_after']} steps"
        yield _line([phase["phase"], str(phase["n_steps"]), ", ".join(map(str, phase["usual_widths"])), after])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _of(rows: Sequence[dict[str, Any]], arm: str, name: str) -> list[float]:
    """By repeat."""
    return [row[name] for row in sorted(rows, key=lambda row: row["repeat"]) if row["arm"] == arm]


def _portable_env(env: dict[str, str]) -> dict[str, str]:
    return {name: portable(value) for name, value in env.items()}
