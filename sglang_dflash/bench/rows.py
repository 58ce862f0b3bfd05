"""Measurements as rows of a document, and their summary.

Every number of a summary can be recomputed from the rows. Unknown values are null.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_dflash.bench.measure import Run, Spread, percentile, ratios, spread

# Other processes' share of the machine up to which a measurement counts as undisturbed.
QUIET = 0.05

Row = dict[str, Any]


def row(place: Mapping[str, Any], speed: Run, latency: Run | None) -> Row:
    """One repeat of one arm at one place.

    Args:
        place: arm, concurrency, repeat and whatever else tells this row from others.
        latency: a streamed run; None where there was none.
    """
    streamed = latency.answers if latency else []
    return dict(place) | {
        "wall_s": round(speed.wall_s, 4),
        "n_tokens": speed.n_tokens,
        "tokens_per_s": round(speed.tokens_per_s, 2),
        "committed_per_step": known(speed.committed_per_step, 4),
        "other_cores": known(speed.other_cores, 3),
        "ttft_ms": [round(answer.ttft_s * 1e3, 2) for answer in streamed if answer.ttft_s == answer.ttft_s],
        "tpot_ms": [round(answer.tpot_s * 1e3, 3) for answer in streamed if answer.tpot_s == answer.tpot_s],
    }


def summarise(rows: Sequence[Row], *, place: Sequence[str], arms: Sequence[str], over: Sequence[str]) -> list[Row]:
    """One line per place and arm; places in ascending order of concurrency, arms in the given one.

    Args:
        place: the fields that tell places apart, concurrency last.
        over: arms that the others' speed is divided by, repeat by repeat; the first arm's is not.
    """
    lines = []
    for where in dict.fromkeys(tuple(row[field] for field in place) for row in rows):
        here = [row for row in rows if tuple(row[field] for field in place) == where]
        for arm in dict.fromkeys(row["arm"] for row in here):
            lines.append(dict(zip(place, where, strict=True)) | _line(here, arm, over, first=arms[0]))
    first_seen = list(dict.fromkeys(tuple(line[field] for field in place[:-1]) for line in lines))
    return sorted(
        lines,
        key=lambda line: (
            first_seen.index(tuple(line[field] for field in place[:-1])),
            line[place[-1]],
            list(arms).index(line["arm"]),
        ),
    )


def _line(here: Sequence[Row], arm: str, over: Sequence[str], first: str) -> Row:
    mine = [row for row in here if row["arm"] == arm]
    latencies = {kind: [value for row in mine for value in row[kind]] for kind in ("ttft_ms", "tpot_ms")}
    line = {
        "arm": arm,
        "tokens_per_s": rounded(spread(_speeds(here, arm))),
        "committed_per_step": _middle([row["committed_per_step"] for row in mine]),
        **{
            kind: {f"p{p}": known(percentile(values, p), 3) for p in (50, 99)} for kind, values in latencies.items()
        },
        "other_cores_max": max((row["other_cores"] for row in mine if row["other_cores"] is not None), default=None),
    }  # fmt: skip
    for other in over:
        theirs = _speeds(here, other)
        if theirs and arm not in (other, first):
            line[f"over_{other}"] = rounded(ratios(_speeds(here, arm), theirs))
    return line


def compared_with(summary: Sequence[Row], arms: Iterable[str]) -> list[str]:
    """Those of `arms` that lines of `summarise` have a ratio to."""
    return [arm for arm in arms if any(f"over_{arm}" in line for line in summary)]


def noise(document: Mapping[str, Any]) -> str:
    """One sentence when other processes were busy while arms were measured, else nothing."""
    told = [row["other_cores"] for row in document["rows"] if row["other_cores"] is not None]
    busiest, cores = max(told, default=0.0), document["machine"]["cores"]
    if busiest <= QUIET * cores:
        return ""
    return f"Not a quiet machine: others kept up to {busiest:.1f} of {cores} cores busy, so do not quote these numbers."


def known(value: float, digits: int) -> float | None:
    """Rounded; None for nan, which JSON has not."""
    return round(value, digits) if value == value else None


def rounded(value: Spread) -> dict[str, float]:
    return {name: round(number, 3) for name, number in value._asdict().items()}


def shown(value: Mapping[str, float] | None, digits: int) -> str:
    """`median (low–high)`, the median alone of one repeat, nothing of None."""
    if value is None:
        return ""
    median, low, high = (f"{value[name]:.{digits}f}" for name in ("median", "low", "high"))
    return median if low == high else f"{median} ({low}–{high})"


def _speeds(rows: Sequence[Row], arm: str) -> list[float]:
    """Tokens per second by repeat."""
    return [row["tokens_per_s"] for row in sorted(rows, key=lambda row: row["repeat"]) if row["arm"] == arm]


def _middle(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return round(spread(told).median, 3) if told else None
