"""Checks in a process of their own, with a time limit: a crash, a hang, a lack of memory is a failed line and no more.

The process writes each result to a file as soon as it has it, so what was found before a crash is kept. Whatever it
started is ended with it: this process adopts orphans, and ends those that were not there before.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from sglang_dflash.prove.machine import Place
from sglang_dflash.prove.record import FAILURES, Check, Failed, Result, Skipped, Status

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 25.0  # a server ends within 20 s of being asked
CRASHED_LINES = 3  # of a log, that a result quotes


def run_apart(
    checks: Sequence[Check], arguments: Sequence[str], *, log: Path, limit_s: float, env: dict[str, str]
) -> list[Result]:
    """The results of `checks`, in their order.

    Args:
        arguments: of `sglang-dflash prove`, by which the process makes its own `Place`.
        log: receives stdout and stderr.
    """
    told = log.with_suffix(".results")
    told.unlink(missing_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    adopt_orphans(True)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    words = [*this_program(), "--child", str(told), "--only", *(check.name for check in checks), *arguments]
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            process.wait(limit_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
            process.terminate()
            wait_quietly(process, GRACE_S)
        finally:
            end_children(besides=before)
            wait_quietly(process, GRACE_S)
            adopt_orphans(False)
    seconds = time.monotonic() - began
    found = {result.name: result for result in read(told)}
    why = f"took more than {limit_s / 60:.1f} minutes" if timed_out else ended(process.returncode, log)
    status = Status.TIMED_OUT if timed_out else Status.FAILED
    return [found.get(check.name) or Result(check.name, status, why, seconds=round(seconds, 1)) for check in checks]


def run_here(checks: Sequence[Check], place: Place, told: Path) -> None:
    """In the process that was started: each check, its result at once."""
    with told.open("a") as file:
        for check in checks:
            file.write(json.dumps(dataclasses.asdict(attempt(check, place))) + "\n")
            file.flush()


def attempt(check: Check, place: Place) -> Result:
    began = time.monotonic()
    try:
        found = check.run(place)
        status, text, numbers = Status.PASSED, found.text, found.numbers
    except Skipped as skipped:
        status, text, numbers = Status.SKIPPED, str(skipped), {}
    except FAILURES as failure:
        numbers = failure.numbers if isinstance(failure, Failed) else {}
        status, text = Status.FAILED, str(failure) or type(failure).__name__
        if not isinstance(failure, AssertionError):
            text = f"{type(failure).__name__}: {text}"
    return Result(check.name, status, text, numbers, round(time.monotonic() - began, 1))


def read(told: Path) -> list[Result]:
    """What was written whole."""
    if not told.exists():
        return []
    lines = [line for line in told.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [Result(**fields | {"status": Status(fields["status"])}) for fields in map(json.loads, lines)]


def ended(status: int, log: Path) -> str:
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-CRASHED_LINES:]
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return f"its process ended with {how}: {' | '.join(last) or 'it said nothing'}"


def adopt_orphans(adopts: bool) -> None:
    """Linux: what a child leaves behind becomes ours, so that it can be found and ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def end_children(*, besides: set[int]) -> None:
    for child in psutil.Process().children(recursive=True):
        if child.pid not in besides:
            try:
                child.kill()
                child.wait(GRACE_S)
            except (psutil.NoSuchProcess, psutil.TimeoutExpired):
                continue


def wait_quietly(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return


def this_program() -> list[str]:
    return [sys.executable, "-m", "sglang_dflash.prove"]
