"""Distribution of tests over two xdist processes, order of tests, and fixtures of many tests.

A unit is a set of tests that one process runs. All tests that share servers and reference answers form one unit, so
that servers and answers are made once. Other units are a file, or a row of a battery (`BATTERIES`). Long units run
first, so that both processes end at about the same time.
"""

import os
import re
import shutil
import signal
from functools import cache
from pathlib import Path

import hypothesis
import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.fixtures import forking, resume
from tests.fixtures.forking import RUN
from tests.fixtures.launching import checkpoints, hub, launch, pair  # noqa: F401  (fixtures of many tests)
from tests.server.lib.rehearsals import REHEARSALS
from tests.server.lib.variants import VARIANTS

hypothesis.settings.register_profile("tests", deadline=None)  # no time limit per example: the machine may be busy
hypothesis.settings.load_profile("tests")

ROOT = Path(__file__).parent.parent
# Battery: test file that starts one server for each row of a table -> the names of the rows.
BATTERIES = {"tests/server/test_exact.py": VARIANTS, "tests/server/test_rehearsal.py": REHEARSALS}
# Server tests that `make test` runs: exactness on one server, and on one server under GPU emulation. Other server tests
# are marked `ci`.
QUICK = re.compile(
    r"tests/server/(test_exact\.py::.*\[hybrid(-\d+)?\]$"
    r"|test_rehearsal\.py::.*\[fa3-graphs-streams-1-and-16(-\d+)?\]$)"
)


def uses_servers(nodeid: str) -> bool:
    return nodeid.startswith("tests/server/")


@cache
def is_full(file: str) -> bool:
    """Return whether a file marks all its tests `full`; such a file does not share servers with others."""
    return re.search(r"^pytestmark = .*mark\.full", (ROOT / file).read_text(), re.MULTILINE) is not None


def scope_of(nodeid: str) -> str:
    """Return the name of a test's unit: "servers" (the shared ones), a file, or a row of a battery."""
    file, _, test = nodeid.partition("::")
    case = test.partition("[")[2].rstrip("]")
    rows = [row for row in BATTERIES.get(file, ()) if case == row or case.startswith(f"{row}-")]
    if rows and max(rows, key=len) != "hybrid":  # the server of row "hybrid" is shared
        return f"{file}[{max(rows, key=len)}]"
    return "servers" if uses_servers(nodeid) and not is_full(file) else file


def rank_of(nodeid: str) -> int:
    """Return the rank by which tests are ordered: 0 shared servers, 1 other servers, 2 the rest."""
    return 0 if scope_of(nodeid) == "servers" else 1 if uses_servers(nodeid) else 2


class ByScope(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByScope:
    config.option.loadscopereorder = False  # keep the order of `pytest_collection_modifyitems`
    return ByScope(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if resume.BEFORE in os.environ:
        resume.leave_out(config, items)
    items.sort(key=lambda item: (rank_of(item.nodeid), "launch" not in item.fixturenames))  # type: ignore[attr-defined]
    for item in items:
        if uses_servers(item.nodeid):
            item.add_marker(pytest.mark.server)
            if not QUICK.match(item.nodeid):
                item.add_marker(pytest.mark.ci)


class FailuresAtOnce:
    """Plugin that prints each failure when it happens, because an interrupted run prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if resume.PASSED in os.environ:
            resume.note(report)
        if report.failed:
            terminal = self.config.get_terminal_writer()
            terminal.line(f"\nFAILED at {report.when}: {report.nodeid}\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
        os.environ[RUN] = str(os.getpid())
        if resume.PASSED in os.environ:
            resume.begin()
        # SIGTERM raises KeyboardInterrupt, which ends the run. Hypothesis would take Exit or SystemExit for a failing
        # example.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Kill processes that an interrupted run has left, and delete the run's Hugging Face cache.

    On an interrupt xdist kills its workers before their fixtures can stop servers.
    """
    if not hasattr(config, "workerinput"):
        for process in psutil.process_iter():
            if process.pid != os.getpid() and run_of(process) == str(os.getpid()):
                process.kill()
        shutil.rmtree(forking.hub(), ignore_errors=True)


def run_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(RUN)
    except psutil.Error:  # the process has ended, or belongs to another user
        return None
