"""Plots as inline SVG: lines with spreads, and shares over time. They need nothing and take the page's colours.

Colours are numbers: `var(--c0)`, `var(--c1)`, ... for lines, `var(--w0)` to `var(--w7)` for shares, narrow to wide.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 420, 270
ENLARGED = 1.15  # at most: a plot that is alone in its row stays as large as one of two
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 38, 44
N_SHADES = 8


class Point(NamedTuple):
    x: float
    y: float
    low: float
    high: float


class Line(NamedTuple):
    name: str
    colour: int
    points: Sequence[Point]
    dashed: bool = False


class Bar(NamedTuple):
    """A stretch of time, and what it consisted of."""

    seconds: float
    shares: Mapping[int, float]  # by width; they add up to 1
    group: str  # of the stretch, and its part of the group; written where they change
    part: str


class _Frame(NamedTuple):
    """From values to pixels."""

    x_low: float
    x_high: float
    y_high: float
    width: float = WIDTH

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return LEFT + (value - self.x_low) / span * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.y_high * (HEIGHT - TOP - BOTTOM)


def line_plot(
    title: str,
    lines: Sequence[Line],
    *,
    x_ticks: Mapping[float, str],
    axes: tuple[str, str],
    level: float | None = None,
) -> str:
    """Lines from zero up, with a bar from the low to the high of each point.

    Args:
        x_ticks: where, and what is written there.
        axes: titles of x and y.
        level: a horizontal line to compare with.
    """
    points = [point for line in lines for point in line.points]
    ticks = _ticks(max([*(point.high for point in points), level or 0.0]))
    inset = 0.04 * (max(x_ticks) - min(x_ticks) or 1.0)
    frame = _Frame(min(x_ticks) - inset, max(x_ticks) + inset, ticks[-1])
    parts = [*_axes(title, frame, ticks, axes)]
    parts += [_text(frame.x(x), HEIGHT - BOTTOM + 15, label, "middle") for x, label in x_ticks.items()]
    if level is not None:
        y = frame.y(level)
        parts.append(f'<path class="level" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
    for line in lines:
        parts += _line(line, frame)
    return _svg(parts, WIDTH, title)


def share_plot(title: str, bars: Sequence[Bar], *, axes: tuple[str, str]) -> str:
    """Shares over time, stretch after stretch."""
    seconds = sum(bar.seconds for bar in bars)
    frame = _Frame(0.0, seconds, 1.0, width=2 * WIDTH)
    widths = shades(bars)
    parts = [*_axes(title, frame, [0.0, 0.25, 0.5, 0.75, 1.0], axes)]
    ticks = [tick for tick in _ticks(seconds) if tick <= seconds]
    parts += [_text(frame.x(tick), HEIGHT - BOTTOM + 15, f"{tick:g}", "middle") for tick in ticks]
    at, free_from, last = 0.0, -math.inf, ("", "")
    for bar in bars:
        parts += _stack(bar, frame, at, widths)
        if (bar.group, bar.part) != last:
            left, label = frame.x(at), bar.part if bar.group == last[0] else f"{bar.group}: {bar.part}"
            parts.append(f'<path class="axis" d="M{left:.1f} {TOP - 14}V{HEIGHT - BOTTOM}"/>')
            if left >= free_from:  # else there is no room for it; pointing at a share tells
                parts.append(_text(left + 3, TOP - 5, label, "start"))
                free_from = left + 6.2 * len(label)
            last = bar.group, bar.part
        at += bar.seconds
    return _svg(parts, frame.width, title)


def _stack(bar: Bar, frame: _Frame, at: float, widths: Mapping[int, int]) -> Iterator[str]:
    left, right, below = frame.x(at), frame.x(at + bar.seconds), 0.0
    for width, share in sorted(bar.shares.items()):
        top, bottom = frame.y(below + share), frame.y(below)
        told = f"width {width}: {share:.0%} of the steps, {bar.group} with {bar.part} in flight"
        yield (
            f'<rect x="{left:.2f}" y="{top:.2f}" width="{right - left + 0.3:.2f}" height="{bottom - top:.2f}" '
            f'fill="var(--w{widths[width]})"><title>{escape(told)}</title></rect>'
        )
        below += share


def shades(bars: Sequence[Bar]) -> dict[int, int]:
    """By width: its colour."""
    widths = sorted({width for bar in bars for width in bar.shares})
    last = max(len(widths) - 1, 1)
    return {width: round(i * (N_SHADES - 1) / last) for i, width in enumerate(widths)}


def key(entries: Sequence[tuple[str, str, bool]]) -> str:
    """What the colours mean: names, CSS colours, and whether the line is dashed."""
    swatches = (
        f'<span><i style="border-color:{colour}{";border-style:dashed" if dashed else ""}"></i>{escape(name)}</span>'
        for name, colour, dashed in entries
    )
    return f'<p class="key">{"".join(swatches)}</p>'


def _line(line: Line, frame: _Frame) -> Iterator[str]:
    colour = f"var(--c{line.colour})"
    path = "L".join(f"{frame.x(point.x):.1f} {frame.y(point.y):.1f}" for point in line.points)
    yield f'<path class="line{" dashed" if line.dashed else ""}" style="stroke:{colour}" d="M{path}"/>'
    for point in line.points:
        x, y = frame.x(point.x), frame.y(point.y)
        if point.low < point.high:
            low, high = frame.y(point.low), frame.y(point.high)
            yield f'<path class="spread" style="stroke:{colour}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
        told = f"{line.name}: {point.y:.4g}" + (f" ({point.low:.4g}–{point.high:.4g})" * (point.low < point.high))
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"><title>{escape(told)}</title></circle>'


def _axes(title: str, frame: _Frame, ticks: Sequence[float], axes: tuple[str, str]) -> Iterator[str]:
    yield _text(LEFT, 14, title, "start", "title")
    for tick in ticks:
        y = frame.y(tick)
        yield f'<path class="{"grid" if tick else "axis"}" d="M{LEFT} {y:.1f}H{frame.width - RIGHT}"/>'
        yield _text(LEFT - 6, y + 4, f"{tick:g}", "end")
    x_title, y_title = axes
    yield _text((LEFT + frame.width - RIGHT) / 2, HEIGHT - 8, x_title, "middle")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<g transform="rotate(-90 12 {middle})">{_text(12, middle, y_title, "middle")}</g>'


def _ticks(highest: float) -> list[float]:
    """Round numbers from zero to at least `highest`, four to six of them."""
    highest = highest or 1.0
    scale = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if highest / (factor * scale) <= 5)
    return [round(i * step, 10) for i in range(math.ceil(highest / step) + 1)]


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _svg(parts: Sequence[str], width: float, title: str) -> str:
    size = f'viewBox="0 0 {width:g} {HEIGHT}" style="max-width: {width * ENLARGED:g}px"'
    return f'<svg {size} role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
