"""What a run of all checks leaves: a JSON document, and a table for people and for the documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.prove.machine import Place
from sglang_dflash.prove.record import Check, Result, Status
from sglang_dflash.servers.document import head, inherited, portable

SHOWN = {Status.PASSED: "yes", Status.FAILED: "**no**", Status.TIMED_OUT: "**no**: timed out", Status.SKIPPED: "–"}


def document(place: Place, checks: Sequence[Check], results: Sequence[Result], command: str) -> dict[str, Any]:
    level = f"{place.level}: {'seen on ' if place.gpu else ''}{place.where}"
    said = {check.name: {"proves": check.proves, "expected": check.expected} for check in checks}
    return head("prove", command) | {
        "level": level,
        "device": place.device,
        "gpu": place.gpu._asdict() if place.gpu else None,
        "form": "short" if place.short else "whole",
        "environment": {name: portable(value) for name, value in inherited().items()},
        "ok": not any(result.is_bad for result in results),
        "results": [
            dataclasses.asdict(result) | said[result.name] | {"text": portable(result.text)} for result in results
        ],
    }


def markdown(document: Mapping[str, Any]) -> str:
    """A line per check; `level` takes the place of P and C in the documents."""
    gpu, level = document["gpu"], document["level"].split(":")[0]
    where = f"{level} ({gpu['name']})" if gpu else f"{level} ({document['device']})"
    lines = ["| check | what it proves | holds | level | found | expected |", "|---|---|---|---|---|---|"]
    for result in document["results"]:
        status = Status(result["status"])
        shown = where if status is not Status.SKIPPED else "–"
        found, expected = escaped(result["text"]), result["expected"] or "–"
        cells = (result["name"], result["proves"], SHOWN[status], shown, found, expected)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def escaped(text: str) -> str:
    return portable(" ".join(text.split())).replace("|", "\\|")


def line(result: Result) -> str:
    """As it is printed while the run goes on."""
    return f"{result.status:<9} {result.seconds:>6.1f} s  {result.name}: {' '.join(result.text.split())}"
