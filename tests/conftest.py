"""Two processes share the tests: one runs the tests that share servers, the other the rest meanwhile, file by file.

The exactness battery starts a server for each of its variants, which nothing else uses in `make test`, so it is a part
of the rest; but its default variant's server is shared. Modules that are `full` as a whole have servers of their own,
and whichever process is free takes the next one.
"""

import os
import re
import shutil
import signal
from functools import cache
from pathlib import Path

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.fixtures import forking
from tests.fixtures.forking import RUN
from tests.fixtures.launching import checkpoints, hub, launch, pair  # noqa: F401  (fixtures of many tests)

ROOT = Path(__file__).parent.parent


def uses_servers(nodeid: str) -> bool:
    return nodeid.startswith("tests/server/")


@cache
def is_full(file: str) -> bool:
    return re.search(r"^pytestmark = .*mark\.full", (ROOT / file).read_text(), re.MULTILINE) is not None


def has_its_own_server(nodeid: str) -> bool:
    file = nodeid.split("::")[0]
    if file == "tests/server/test_exact.py":
        return not re.search(r"\[hybrid(-\d+)?\]$", nodeid)
    return is_full(file)


class ByServers(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        shared = uses_servers(nodeid) and not has_its_own_server(nodeid)
        return "servers" if shared else nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByServers:
    return ByServers(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if uses_servers(item.nodeid):
            item.add_marker(pytest.mark.server)


class FailuresAtOnce:
    """Says each failure when it happens: a battery of hours that is cut off has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self.config.get_terminal_writer()
            terminal.line(f"\nFAILED at {report.when}: {report.nodeid}\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
        os.environ[RUN] = str(os.getpid())
        # KeyboardInterrupt: Hypothesis takes pytest's own Exit, and SystemExit too, for an example that fails
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Whatever a run that is cut off leaves behind ends with it: xdist ends its workers without their fixtures."""
    if not hasattr(config, "workerinput"):
        for process in psutil.process_iter():
            if process.pid != os.getpid() and run_of(process) == str(os.getpid()):
                process.kill()
        shutil.rmtree(forking.hub(), ignore_errors=True)


def run_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(RUN)
    except psutil.Error:  # it has just ended, or is another user's
        return None
