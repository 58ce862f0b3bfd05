"""Pytest hooks of the process that collects results: table and JSON document."""

import ctypes
import json
import pickle
import time
from collections.abc import Mapping
from typing import Any

import psutil
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScheduling
from xdist.workermanage import WorkerController

from sglang_dflash.pairs.servers.document import head, inherited, portable
from sglang_dflash.tools.prove.plugin import RUN, Check, Run, facts_of, server_of

PR_SET_CHILD_SUBREAPER = 36
KILL_S = 25.0  # seconds to wait for killed processes to end
SHOWN = {"passed": "yes", "failed": "**no**", "timed out": "**no**: timed out", "skipped": "–"}
CRASHED = "???"  # value of `when` in xdist's report of a crashed process


def adopt_orphans() -> None:
    """Adopt all processes that children of this process leave running (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    left = psutil.Process().children(recursive=True)
    for child in left:
        child.kill()
    psutil.wait_procs(left, KILL_S)


class InOrder(LoadScheduling):
    """xdist scheduler that runs checks in order. If a process ends between two checks, no check counts as crashed."""

    started: Mapping[str, float] = {}

    def remove_node(self, node: WorkerController) -> str | None:
        pending, names = self.node2pending.pop(node), self.collection or []
        crashed = names[pending.pop(0)] if pending and names[pending[0]] in self.started else None
        self.pending[:0] = pending
        return crashed


class Collector:
    """Collector of results from pytest's reports.

    Attributes:
        checks, rows: descriptions and results by pytest's node id, in the order of the run.
        started: start of each check by node id, as Unix time.
        hung: name of the check that timed out, by `server_of`. Other checks with the same server are skipped.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.checks, self.rows = dict[str, Check](), dict[str, dict[str, Any]]()
        self.started, self.hung = dict[str, float](), dict[str, str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[RUN] = self.run

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.checks = {item.nodeid: facts_of(item) for item in session.items}
        for nodeid, facts in self.checks.items():
            about = {
                "name": facts.name,
                "level": self.run.place.level,
                "proves": facts.proves,
                "expected": facts.expected,
            }
            self.rows[nodeid] = about | {"status": "skipped", "text": "did not run", "numbers": {}, "seconds": 0.0}

    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput["run"] = pickle.dumps((self.run, self.hung))

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Producer) -> LoadScheduling:
        config.pluginmanager.unregister(name="terminaldistreporter")  # this would print a line for every ended worker
        scheduler = InOrder(config, log)
        scheduler.started = self.started
        return scheduler

    def pytest_testnodedown(self) -> None:
        end_children()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.started[nodeid] = time.time()
        self.rows[nodeid]["text"] = "did not end"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        facts, row, when = self.checks[report.nodeid], self.rows[report.nodeid], str(report.when)
        if when == "call" or not report.passed:
            row["status"], row["text"] = report.outcome, text_of(report, facts.name)
            if when == "call" and report.user_properties:
                row["text"], row["numbers"] = json.loads(str(report.user_properties[0][1]))
        seconds = time.time() - self.started[report.nodeid]
        limit_s = self.run.limit_s(facts, self.started[report.nodeid])
        if when == CRASHED and seconds >= limit_s:
            row["status"], row["text"] = "timed out", f"took more than {limit_s / 60:.1f} minutes"
            if limit_s < 60 * facts.minutes:
                row["text"] = (
                    f"--minutes ended it after {limit_s / 60:.1f} of {facts.minutes:g} minutes; raise --minutes"
                )
            else:
                self.hung |= {server: facts.name for server in [server_of(report.nodeid)] if server}
        row["seconds"] = round(seconds, 1)
        if when in ("teardown", CRASHED):
            print(f"{row['status']:<9} {seconds:>6.1f} s  {facts.name}: {' '.join(row['text'].split())}", flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        """Return the category for pytest's counts, and empty texts, so that pytest prints no letter per check."""
        return report.outcome if report.when == "call" or not report.passed else "", "", ""

    def document(self, command: str, *, ok: bool) -> dict[str, Any]:
        """Return the JSON document: every selected check, with its result."""
        place = self.run.place
        return head("prove", command) | {
            "level": f"{place.level}: {'seen on ' if place.gpu else ''}{place.where}",
            "device": place.device,
            "gpu": place.gpu._asdict() if place.gpu else None,
            "form": "short" if place.short else "whole",
            "environment": {name: portable(value) for name, value in inherited().items()},
            "ok": ok,
            "results": [row | {"text": portable(row["text"])} for row in self.rows.values()],
        }


def text_of(report: pytest.TestReport, name: str) -> str:
    """Return a sentence with the reason for a skip or a failure of the check `name`."""
    if report.when == CRASHED:
        return f"its process crashed; see checks.log after the line `-- {name}`"
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash: Any = vars(report.longrepr).get("reprcrash") if report.longrepr else None
    return crash.message.removeprefix("AssertionError: ") if crash else report.longreprtext


def markdown(document: Mapping[str, Any]) -> str:
    """Return a Markdown table with a line per check. Column `level`: G, seen on a GPU; R, seen on an emulated GPU."""
    name = document["gpu"]["name"] if document["gpu"] else document["device"]
    lines = ["| check | what it proves | holds | level | found | expected |", "|---|---|---|---|---|---|"]
    for row in document["results"]:
        level = "–" if row["status"] == "skipped" else f"{row['level']} ({name})"
        text = " ".join(row["text"].split()).replace("|", "\\|")
        cells = (row["name"], row["proves"], SHOWN[row["status"]], level, text, row["expected"] or "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
