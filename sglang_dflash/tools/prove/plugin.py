"""Pytest plugin of processes that run checks. It defines `Check` and `Finding`, and sets time limits of checks."""

import faulthandler
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_dflash.tools.prove.machine import Place

LEAST_S = 20.0  # seconds; no check starts with less time left
GRACE_S = 5.0  # seconds after the limit; then faulthandler ends the process, even if native code blocks pytest-timeout


class Check(NamedTuple):
    """Description of a check, as the table shows it."""

    name: str
    proves: str  # sentence without its full stop
    minutes: float  # time limit, including the start of a server
    short: bool = False  # also runs with --short
    gpu: bool = False  # needs a GPU
    expected: str = ""  # values for comparison with the measured ones


class Finding(NamedTuple):
    """Result of a check."""

    text: str
    numbers: dict[Any, Any]
    holds: bool = True  # whether the check passes


class Run(NamedTuple):
    """One call of `sglang-dflash prove`, passed to each of its processes."""

    place: Place
    only: tuple[str, ...]  # names of checks; empty: all
    deadline: float  # Unix time

    def limit_s(self, facts: Check, began: float) -> float:
        return min(60 * facts.minutes, self.deadline - began)


Found = Callable[[Finding], None]
RUN, FILE, HUNG = pytest.StashKey[Run](), pytest.StashKey[Path](), pytest.StashKey[dict[str, str]]()


def check(name: str, proves: str, minutes: float, **more: Any) -> pytest.MarkDecorator:
    """Mark a function as a check; the arguments are the fields of `Check`."""
    return pytest.mark.check(Check(name, proves, minutes, **more))


def facts_of(item: pytest.Item) -> Check:
    return next(item.iter_markers("check")).args[0]


def server_of(nodeid: str) -> str:
    """Return a check's file and parameters, equal for checks that share a server; "" for a check without parameters."""
    file, _, function = nodeid.partition("::")
    return file + function[function.index("[") :] if "[" in function else ""


@pytest.fixture(scope="session")
def place(pytestconfig: pytest.Config) -> Place:
    return pytestconfig.stash[RUN].place


@pytest.fixture
def found(record_property: Callable[[str, object], None]) -> Found:
    """Return a function that records a check's finding, and fails the check if the finding does not hold."""

    def report(finding: Finding) -> None:
        record_property("finding", json.dumps(finding[:2]))  # xdist sends only Python's own types
        if not finding.holds:
            pytest.fail(finding.text, pytrace=False)

    return report


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "check(facts): a check of `sglang-dflash prove`")
    if sent := vars(config).get("workerinput"):
        config.stash[RUN], config.stash[HUNG] = run, _ = pickle.loads(sent["run"])
        log = os.open(run.place.folder / "checks.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the checks that `--short` selects first, and remove checks that were not selected."""
    run = config.stash[RUN]
    kept = [item for item in items if facts_of(item).short or not run.place.short]
    if unknown := set(run.only) - {facts_of(item).name for item in items}:
        raise pytest.UsageError(f"no check is called {', '.join(sorted(unknown))}; --list names them")
    if longer := set(run.only) - {facts_of(item).name for item in kept}:
        raise pytest.UsageError(f"{', '.join(sorted(longer))}: not in the short form; leave out --short")
    kept.sort(key=lambda item: not facts_of(item).short)
    items[:] = [item for item in kept if not run.only or facts_of(item).name in run.only]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Set a check's time limit. Under xdist, also run each file in a new process.

    The end of a process frees its GPU memory. Errors of CUDA do not affect the checks of other files.
    """
    config, facts = item.config, facts_of(item)
    if "workerinput" in vars(config) and config.stash.setdefault(FILE, item.path) != item.path:
        os._exit(0)  # xdist starts a new process for the next file
    print(f"-- {facts.name}", flush=True)
    limit_s = max(config.stash[RUN].limit_s(facts, time.time()), 1)
    item.add_marker(pytest.mark.timeout(limit_s, method="thread"))
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_setup(item: pytest.Item) -> None:
    run = item.config.stash[RUN]
    if before := item.config.stash.get(HUNG, {}).get(server_of(item.nodeid)):
        pytest.skip(f"skipped, because {before} timed out on the same server")
    if facts_of(item).gpu and run.place.gpu is None:
        pytest.skip("needs a GPU")
    if (left_s := run.deadline - time.time()) < LEAST_S:
        left = f"{max(left_s, 0):.0f} s of --minutes are left"
        pytest.skip(f"{left}, and no check starts with less than {LEAST_S:.0f} s; raise --minutes")
