"""Plots: refusals before any work, and the files that matplotlib draws."""

import sys
from pathlib import Path

import pytest

from sglang_dflash import plot
from sglang_dflash.plot import Curve, Panel

PANEL = Panel("Speed", "requests", "tokens per second", {"off": Curve([1, 8], [5, 20])}, doubling=True)
OTHER = Panel("Acceptance", "slot", "share", {"ours": Curve([1, 2, 3], [0.9, 0.6, 0.2])})


def test_a_plot_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^--plot needs matplotlib, the extra `plot` .*; run pip install matplotlib$"):
        plot.require(Path("a.png"))


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("a.jpg", r"--plot a.jpg has no suffix of a picture; end it with one of .png, .svg, .pdf"),
        ("a", "--plot a has no suffix"),
        ("nowhere/a.png", "--plot nowhere/a.png: there is no folder nowhere; make it"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused(path: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        plot.require(Path(path))


def test_panels_are_drawn_without_a_display(tmp_path: Path) -> None:
    for suffix in plot.FORMATS:
        plot.require(tmp_path / f"a{suffix}")
        plot.draw([[PANEL, PANEL], [OTHER]], tmp_path / f"a{suffix}", "title")
    picture = (tmp_path / "a.svg").read_text()
    for text, n in {"title": 1, "Speed": 2, "Acceptance": 1, "tokens per second": 2, "off": 2, "8": 2}.items():
        assert picture.count(f">{text}</text>") == n, text
    assert "matplotlib.pyplot" not in sys.modules, "it would choose a display"


def test_a_name_has_one_colour_in_all_panels(tmp_path: Path) -> None:
    both = PANEL._replace(curves={"off": PANEL.curves["off"], "ours": Curve([1, 8], [9, 25])})
    plot.draw([[both, OTHER]], tmp_path / "a.svg", "title")
    first, second = (tmp_path / "a.svg").read_text().split('id="axes_2"')
    blue, orange = "#1f77b4", "#ff7f0e"
    assert blue in first
    assert orange in first
    assert blue not in second
    assert orange in second
