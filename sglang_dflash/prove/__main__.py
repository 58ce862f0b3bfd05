"""Prove on this machine what the documents say: `sglang-dflash prove --help`.

The lines of the table come one by one while the checks run; then the table, and the path of the JSON document. Exit
status: 0 if nothing failed, 1 if something did, 2 if nothing could be tried.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from sglang_dflash.prove import report
from sglang_dflash.prove.apart import run_apart, run_here
from sglang_dflash.prove.machine import Place, place_of
from sglang_dflash.prove.record import Check, Needs, Result, Status
from sglang_dflash.servers.document import write
from sglang_dflash.servers.server import end_on_sigterm

LEAST_S = 20.0  # no process is started for less
MINUTES, MINUTES_SHORT = 60.0, 12.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang-dflash prove", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--list", action="store_true", help="the checks, and leave")
    add("--only", nargs="+", metavar="NAME", help="these checks alone")
    add("--short", action="store_true", help="the checks worth most, on fewer prompts")
    add(
        "--minutes",
        type=float,
        help=f"for everything; the rest is skipped ({MINUTES:g}, short {MINUTES_SHORT:g})",
    )
    add("--model-path", help="a target of your own instead of the tiny pairs")
    add("--draft-path", help="its draft")
    add("--out", type=Path, metavar="FILE", help="the JSON document (dflash-prove-<time>.json); logs go beside it")
    add("--port", type=int, default=31600, help="look for free ports from here on (%(default)s)")
    add(
        "--install-entry-points",
        type=Path,
        metavar="DIR",
        help="where pip cannot: into DIR on PYTHONPATH",
    )
    add("--child", type=Path, help=argparse.SUPPRESS)
    add("--flags", nargs=argparse.REMAINDER, metavar="...", help="further flags of every server; must come last")
    options = parser.parse_args(arguments)
    if options.minutes is None:
        options.minutes = MINUTES_SHORT if options.short else MINUTES
    options.out = options.out or Path(f"dflash-prove-{datetime.now():%Y%m%d-%H%M%S}.json")
    options.folder = options.out.with_name(f"{options.out.stem}-logs")
    return options


def chosen(place: Place, names: Sequence[str] | None) -> list[Check]:
    """
    Raises:
        ValueError: a name that no check has.
    """
    from sglang_dflash.prove.catalogue import checks

    made = checks(place)
    if unknown := set(names or ()) - {check.name for check in made}:
        raise ValueError(f"no check is called {', '.join(sorted(unknown))}; --list names them")
    return [check for check in made if not names or check.name in names]


def skip(check: Check, place: Place, left_s: float) -> str:
    """Why it cannot run; nothing if it can."""
    if check.needs is Needs.GPU and place.gpu is None:
        return "needs a GPU"
    if check.needs is Needs.REHEARSAL and place.gpu is not None:
        return "only where a GPU is rehearsed"
    return f"no time left of --minutes ({left_s:.0f} s)" if left_s < LEAST_S else ""


def run_all(checks: Sequence[Check], place: Place, options: argparse.Namespace, own: Sequence[str]) -> list[Result]:
    from sglang_dflash.prove.catalogue import processes

    deadline, found = time.monotonic() + 60 * options.minutes, dict[str, Result]()
    for number, together in enumerate(processes(list(checks))):
        left_s = deadline - time.monotonic()
        why = {check.name: skip(check, place, left_s) for check in together}
        results = [Result(check.name, Status.SKIPPED, why[check.name]) for check in together if why[check.name]]
        if able := [check for check in together if not why[check.name]]:
            limit_s = min(left_s, 60 * sum(check.minutes for check in able))
            log = options.folder / f"{number:02d}-{able[0].name.replace(' ', '-').replace(',', '')}.log"
            results += run_apart(able, own, log=log, limit_s=limit_s, env=place.child_env)
        for result in results:
            print(report.line(result), flush=True)
            found[result.name] = result
    return [found[check.name] for check in checks]


def without(arguments: Sequence[str]) -> list[str]:
    """What a child is told as well: all but what chooses the checks."""
    kept, dropping = list[str](), False
    for i, word in enumerate(arguments):
        if word == "--flags":
            return [*kept, *arguments[i:]]
        if word.startswith("--"):
            dropping = word == "--only"
        if not dropping:
            kept.append(word)
    return kept


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        if options.install_entry_points:
            return install(options.install_entry_points)
        place = place_of(options)
        checks = chosen(place, options.only)
    except ValueError as error:
        print(f"prove: {error}", file=sys.stderr)
        return 2
    end_on_sigterm()
    if options.child:
        run_here(checks, place, options.child)
        return 0
    if options.list:
        for check in checks:
            print(f"{check.name:<28} {check.minutes:>3g} min  {check.needs:<9}  {check.proves}")
        return 0
    print(f"{len(checks)} checks, {place.where}, at most {options.minutes:g} minutes; logs in {options.folder}")
    results = run_all(checks, place, options, ["--out", str(options.out), *without(arguments)])
    document = report.document(place, checks, results, shlex.join(["sglang-dflash", "prove", *arguments]))
    print(report.markdown(document))
    print(write(document, options.out))
    return 0 if document["ok"] else 1


def install(folder: Path) -> int:
    from sglang_dflash.prove import install

    for path in install.install(folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
