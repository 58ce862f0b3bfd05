"""The plot of `launch/simulate_width.py`: every published point."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLUMNS = (("block 8", "block_8", "tab:orange"), ("block 16", "block_16", "tab:blue"))


def plot(document: dict[str, Any], path: Path) -> None:
    """A row of panels per card, throughput over the better published column."""
    cards = list(dict.fromkeys(row["card"] for row in document["points"]))
    tasks = {
        card: list(dict.fromkeys(row["task"] for row in document["points"] if row["card"] == card)) for card in cards
    }
    n_columns = max(map(len, tasks.values()))
    figure = pyplot.figure(figsize=(2.6 * n_columns, 5.7), layout="constrained")
    grid = figure.add_gridspec(len(cards), n_columns)
    for i, card in enumerate(cards):
        for j, task in enumerate(tasks[card]):
            panel = figure.add_subplot(grid[i, j])
            rows = [row for row in document["points"] if (row["card"], row["task"]) == (card, task)]
            _points(panel, rows)
            panel.set_title(f"{card.removesuffix('-DFlash')}\n{task}", fontsize=9)
            if j == 0:
                panel.set_ylabel("throughput / better column")
            if i == j == 0:
                panel.legend(fontsize=7, loc="lower left")
    _title(figure)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)


def _points(panel: Axes, rows: list[dict[str, Any]]) -> None:
    places = range(len(rows))
    better = [max(row["published"]["block_8"], row["published"]["block_16"]) for row in rows]
    for label, name, colour in COLUMNS:
        ratios = [row["published"][name] / best for row, best in zip(rows, better, strict=True)]
        panel.plot(places, ratios, "o--", color=colour, label=label, markersize=4, linewidth=1)
    for label, launch, marker in (("chosen width", "own", "D-"), ("chosen, costs shared", "shared", "x:")):
        panel.plot(
            places, [row[launch]["over_better"] for row in rows], marker, color="black", label=label, markersize=4
        )
    panel.axhline(0.98, color="grey", linewidth=0.6)
    panel.set_xticks(places, [str(row["concurrency"]) for row in rows])
    panel.set_ylim(0.7, 1.1)
    panel.set_xlabel("concurrency", fontsize=8)
    panel.tick_params(labelsize=8)


def _title(figure: Figure) -> None:
    figure.suptitle("The width chosen every step, at the points two model cards publish: computed, not measured")
