"""Command line that checks the documented claims on this machine: `sglang-dflash prove --help`.

A line is printed after each check. The table and the path of the JSON document are printed at the end. Exit status: 0
if no check failed, 1 if a check failed or the run was interrupted, 2 if no check could be run.
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

from sglang_dflash.cli import Parser, positive
from sglang_dflash.pairs.servers.document import require_folder, write
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import port_number
from sglang_dflash.tools.prove.machine import place_of

NEEDED = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist"}  # module -> package
HERE = Path(__file__).parent
FILES = [HERE / f"{name}.py" for name in ("environment", "inside", "ops", "draft_graph", "outside")]  # in this order
MINUTES, MINUTES_SHORT = 60.0, 12.0
# Arguments of pytest: no configuration file, no conftest.py, this package's plugin, and one process that is restarted
# for each file. `main` disables all other plugins by an environment variable.
PYTEST = [
    *("-c", os.devnull, "--rootdir", str(HERE), "--noconftest", "--import-mode=append", "--max-worker-restart=99"),
    *("-p", "sglang_dflash.tools.prove.plugin", "-p", "pytest_timeout", "-p", "xdist.plugin", "-p", "no:faulthandler"),
    *("-p", "no:warnings", "-n1", "-q", "-s", "--tb=short", "-o", "python_functions=check_*"),
]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options. Options for pytest are in `more`."""
    parser = Parser(
        prog="sglang-dflash prove",
        usage="%(prog)s [options] [pytest's options]",
        description="Run the documented claims as checks on this machine, and write a table and a JSON document.",
        epilog="Other options go to pytest: -k EXPRESSION, -x, --lf, --tb=long, -n0 --pdb.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the checks; needs no GPU")
    add("--only", nargs="+", default=[], metavar="NAME", help="run only these checks, with their names in --list")
    add("--short", action="store_true", help="run the most important checks, on fewer prompts")
    limit = f"time limit of the run; later checks are skipped (default: {MINUTES:g}, with --short {MINUTES_SHORT:g})"
    add("--minutes", type=positive, help=limit)
    add("--model-path", help="target to serve instead of the tiny one")
    add("--draft-path", help="draft of that target")
    out = "JSON document; logs are written beside it (default: dflash-prove-<time>.json)"
    add("--out", type=Path, metavar="FILE", help=out)
    add("--port", type=port_number, default=31600, help="first port to try")
    add("--flags", nargs=argparse.REMAINDER, metavar="...", help="more flags for every server; must come last")
    options, more = parser.parse_known_args(arguments)
    options.more = [word for word in more if word != "--"]
    if options.minutes is None:
        options.minutes = MINUTES_SHORT if options.short else MINUTES
    options.out = (options.out or Path(f"dflash-prove-{datetime.now():%Y%m%d-%H%M%S}.json")).absolute()
    if options.out.is_dir():
        parser.error(f"--out {options.out} is a folder; give a file in it")
    options.folder = options.out.with_name(f"{options.out.stem}-logs")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if missing := [package for module, package in NEEDED.items() if find_spec(module) is None]:
        print(f"prove: not installed: {', '.join(missing)}; pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    try:
        place = place_of(options)
    except ValueError as error:
        print(f"prove: {error}", file=sys.stderr)
        return 2
    import pytest

    from sglang_dflash.tools.prove.plugin import Run
    from sglang_dflash.tools.prove.report import Collector, adopt_orphans, end_children, markdown

    os.environ.update(place.env_of_checks | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    # SIGTERM raises KeyboardInterrupt, as Ctrl-C does. So pytest ends its workers and returns.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    words = [*map(str, FILES), *PYTEST, "-o", f"cache_dir={options.out.parent / '.prove_cache'}", *options.more]
    collector = Collector(Run(place, tuple(options.only), deadline=0))
    with redirect_stdout(StringIO()) as output:
        status = pytest.main([*words, "--collect-only", "-n0"], [collector])
    if status != pytest.ExitCode.OK:
        print(output.getvalue(), file=sys.stderr)
        return 2
    if options.list:
        if place.is_assumed:
            more = "SGLANG_DFLASH_REHEARSE=sm100 lists those of sm100"
            print(f"prove: found no GPU; these are the checks of {place.device}. {more}", file=sys.stderr)
        for facts in collector.checks.values():
            needs = "gpu" if facts.gpu else "any"
            print(f"{facts.name:<28} {facts.minutes:>3g} min  {needs:<3}  {facts.proves}")
        return 0
    try:
        require_folder(options.folder, "--out")
    except ServerError as error:
        print(f"prove: {error}", file=sys.stderr)
        return 2
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
