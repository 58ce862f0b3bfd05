"""The plot of `launch/bench_width.py`: speeds by concurrency, the widths chosen, and a text that changes."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from launch.width_report import AUTO, BOUND, OFF, STATIC

COLOURS = dict(zip(STATIC, ("tab:red", "tab:green", "tab:orange", "tab:blue"), strict=True)) | {
    OFF: "grey",
    AUTO: "black",
}


def plot(document: dict[str, Any], path: Path) -> None:
    figure = pyplot.figure(figsize=(11, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=(2, 1, 1))
    for column, workload in enumerate(("easy", "hard", "hopeless")):
        lines = [line for line in document["summary"] if line["workload"] == workload]
        _speeds(figure.add_subplot(grid[0, column]), workload, lines)
    _trace(figure.add_subplot(grid[1, :]), document["changing"])
    where = document["machine"]
    figure.suptitle(f"The width chosen every step, beside always the same one: tiny pair, {where['cores']} CPU cores")
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)


def _speeds(panel: Axes, workload: str, lines: list[dict[str, Any]]) -> None:
    """Tokens per second over the best static width's, with min and max over the repeats."""
    places = range(len(lines))
    for arm in (OFF, *STATIC, AUTO):
        speeds = [line["tokens_per_s"][arm] for line in lines]
        best = [line["tokens_per_s"][line["best_static"]]["median"] for line in lines]
        middle, low, high = (
            [speed[name] / b for speed, b in zip(speeds, best, strict=True)] for name in ("median", "low", "high")
        )
        down, up = ([abs(end - m) for end, m in zip(ends, middle, strict=True)] for ends in (low, high))
        label = {OFF: "no speculation", AUTO: "chosen"}.get(arm, f"always {arm}")
        panel.errorbar(
            places, middle, yerr=[down, up], fmt="D-" if arm == AUTO else "o--",
            color=COLOURS[arm], label=label, markersize=4, linewidth=1, capsize=2,
        )  # fmt: skip
    panel.axhline(BOUND, color="grey", linewidth=0.6)
    panel.set_xticks(places, [str(line["concurrency"]) for line in lines])
    panel.set_xlabel("concurrency")
    panel.set_ylabel("tokens/s / best static width")
    panel.set_title(workload, fontsize=9)
    panel.legend(fontsize=7)


def _trace(panel: Axes, changing: dict[str, Any]) -> None:
    panel.plot(changing["widths"], drawstyle="steps-post", color="black", linewidth=0.8)
    shares = [n / of for n, of in zip(changing["hopeless_requests"], changing["requests"], strict=True)]
    panel.fill_between(range(len(shares)), 0, [17 * s for s in shares], step="post", color="tab:red", alpha=0.15, lw=0)
    panel.set_title(
        f"easy, hopeless, easy in one stream, concurrency {changing['concurrency']} (shaded: the hopeless ones' share)",
        fontsize=9,
    )
    panel.set_xlabel("step")
    panel.set_ylabel("width")
