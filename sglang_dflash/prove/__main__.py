"""Prove on this machine what the documents say: `sglang-dflash prove --help`.

A line is printed after each check, then the table, and the path of the JSON document. Exit status: 0 if nothing failed,
1 if something did, 2 if nothing could be tried.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from datetime import datetime
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from sglang_dflash.prove.machine import place_of
from sglang_dflash.servers.document import write

NEEDED = ("pytest", "pytest_timeout", "xdist")
HERE = Path(__file__).parent
FILES = [HERE / f"{name}.py" for name in ("environment", "inside", "ops", "draft_graph", "outside")]  # in this order
MINUTES, MINUTES_SHORT = 60.0, 12.0
# Isolates pytest: no configuration file, no conftest.py, no other plugin.
PYTEST = [
    *("-c", os.devnull, "--rootdir", str(HERE), "--noconftest", "--import-mode=append", "--max-worker-restart=99"),
    *("-p", "sglang_dflash.prove.plugin", "-p", "pytest_timeout", "-p", "xdist.plugin", "-p", "no:faulthandler"),
    *("-p", "no:warnings", "-n1", "-q", "-s", "--tb=short", "-o", "python_functions=check_*"),
]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; those for pytest are in `more`."""
    parser = argparse.ArgumentParser(
        prog="sglang-dflash prove",
        description=(__doc__ or "").split("\n")[0],
        epilog="Other options are pytest's: -k EXPRESSION, -x, --lf, --tb=long, -n0 --pdb.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the checks and leave")
    add("--only", nargs="+", default=[], metavar="NAME", help="run these checks alone")
    add("--short", action="store_true", help="run the most important checks, on fewer prompts")
    add("--minutes", type=float, help=f"for everything; the rest is skipped ({MINUTES:g}, short {MINUTES_SHORT:g})")
    add("--model-path", help="a target of your own instead of the tiny one")
    add("--draft-path", help="its draft")
    add("--out", type=Path, metavar="FILE", help="the JSON document (dflash-prove-<time>.json); logs go beside it")
    add("--port", type=int, default=31600, help="first port to try (%(default)s)")
    add("--flags", nargs=argparse.REMAINDER, metavar="...", help="further flags of every server; must come last")
    options, more = parser.parse_known_args(arguments)
    options.more = [word for word in more if word != "--"]
    if options.minutes is None:
        options.minutes = MINUTES_SHORT if options.short else MINUTES
    options.out = (options.out or Path(f"dflash-prove-{datetime.now():%Y%m%d-%H%M%S}.json")).absolute()
    options.folder = options.out.with_name(f"{options.out.stem}-logs")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(f"prove: {', '.join(missing)} is missing; pip install 'sglang-dflash[prove]'", file=sys.stderr)
        return 2
    try:
        place = place_of(options)
    except ValueError as error:
        print(f"prove: {error}", file=sys.stderr)
        return 2
    import pytest

    from sglang_dflash.prove.plugin import Run
    from sglang_dflash.prove.report import Collector, adopt_orphans, end_children, markdown

    os.environ.update(place.env_of_checks | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # pytest ends its workers, and returns
    words = [*map(str, FILES), *PYTEST, "-o", f"cache_dir={options.out.parent / '.prove_cache'}", *options.more]
    collector = Collector(Run(place, tuple(options.only), deadline=0))
    with redirect_stdout(StringIO()) as output:
        status = pytest.main([*words, "--collect-only", "-n0"], [collector])
    if status != pytest.ExitCode.OK:
        print(output.getvalue(), file=sys.stderr)
        return 2
    if options.list:
        for facts in collector.checks.values():
            needs = "gpu" if facts.gpu else "any"
            print(f"{facts.name:<28} {facts.minutes:>3g} min  {needs:<3}  {facts.proves}")
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    n_checks, limit = len(collector.checks), f"at most {options.minutes:g} minutes"
    print(f"{n_checks} checks, {place.where}, {limit}; logs in {options.folder}")
    collector.run = collector.run._replace(deadline=time.time() + 60 * options.minutes)
    adopt_orphans()
    try:
        status = pytest.main(words, [collector])
    finally:
        end_children()
    ok = status == pytest.ExitCode.OK
    document = collector.document(shlex.join(["sglang-dflash", "prove", *arguments]), ok=ok)
    print(markdown(document))
    print(write(document, options.out))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
