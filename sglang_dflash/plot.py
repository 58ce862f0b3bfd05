"""Plots of measurements, drawn by matplotlib. Package extra `plot` installs it."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

FORMATS = (".png", ".svg", ".pdf")
PANEL_INCHES = (5.0, 3.6)


class Curve(NamedTuple):
    """Values `y` at the positions `x`."""

    x: Sequence[float]
    y: Sequence[float]


class Panel(NamedTuple):
    """One diagram with curves by name."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Curve]
    doubling: bool = False  # x is logarithmic, with a tick at every x of a curve


def require(path: Path, option: str = "--plot") -> None:
    """Check before any work begins that a plot can be written to `path`, the value of `option`.

    Raises:
        ValueError: matplotlib is missing, the suffix names no format, or there is no such folder.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib, the extra `plot` of this package; run pip install matplotlib")
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{option} {path} has no suffix of a picture; end it with one of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it")


def draw(rows: Sequence[Sequence[Panel]], path: Path, title: str) -> None:
    """Draw rows of panels, at least one, into the file `path`. Curves of one name have one colour in all panels."""
    from matplotlib import rc_context  # takes half a second to import, and may be missing
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for row in rows for panel in row for name in panel.curves)
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    n_columns, (width, height) = max(map(len, rows)), PANEL_INCHES
    figure = Figure(figsize=(width * n_columns, height * len(rows)), layout="constrained")
    figure.suptitle(title)
    for row, axes in zip(rows, figure.subplots(len(rows), n_columns, squeeze=False), strict=True):
        for panel, ax in zip_longest(row, axes):
            if panel:
                _draw(panel, ax, colours)
            else:
                ax.set_axis_off()
    with rc_context({"svg.fonttype": "none"}):  # text stays text, in half of the bytes
        figure.savefig(path, dpi=150)


def _draw(panel: Panel, ax: Any, colours: Mapping[str, str]) -> None:
    ax.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    for name, curve in panel.curves.items():
        ax.plot(curve.x, curve.y, marker="o", markersize=3, label=name, color=colours[name])
    if panel.doubling:
        ticks = sorted({x for curve in panel.curves.values() for x in curve.x})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend()
