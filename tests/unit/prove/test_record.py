"""Checks as records: what comes of one, in a process of its own, within its time; the document and the table."""

import argparse
import json
import os
import sys
import textwrap
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_dflash.check.findings import ENTRY_POINTS
from sglang_dflash.prove import __main__ as program
from sglang_dflash.prove import apart, machine, report
from sglang_dflash.prove.catalogue import checks, processes
from sglang_dflash.prove.install import install
from sglang_dflash.prove.machine import Gpu, Place
from sglang_dflash.prove.record import Check, Failed, Finding, Needs, Once, Result, Skipped, Status, require
from sglang_dflash.tiny import pairs as tiny

H200 = Gpu("NVIDIA H200", "sm90", 141 << 30)


def place(tmp_path: Path, gpu: Gpu | None = None, **changes: Any) -> Place:
    pairs = {machine.HYBRID: tiny.HYBRID, machine.DENSE: tiny.DENSE}
    fields = {"pairs": pairs, "server_flags": (), "short": False, "folder": tmp_path, "port": 31600} | changes
    return Place(gpu=gpu, device="sm90", **fields)


def check(name: str, run: Any, **fields: Any) -> Check:
    return Check(name, f"{name} holds", 1, run, **fields)


# -- one check -----------------------------------------------------------------------------------------------------


def raising(error: Exception) -> Any:
    def run(_: Place) -> Finding:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "status", "text", "numbers"),
    [
        (lambda _: Finding("3 of 3", {"n": 3}), Status.PASSED, "3 of 3", {"n": 3}),
        (lambda _: require(False, "2 of 3", {"n": 2}), Status.FAILED, "2 of 3", {"n": 2}),
        (raising(Failed("none", {"n": 0})), Status.FAILED, "none", {"n": 0}),
        (raising(AssertionError("odd")), Status.FAILED, "odd", {}),
        (raising(RuntimeError("CUDA error")), Status.FAILED, "RuntimeError: CUDA error", {}),
        (raising(KeyError("drafts")), Status.FAILED, "KeyError: 'drafts'", {}),
        (raising(Skipped("no such file")), Status.SKIPPED, "no such file", {}),
    ],
)
def test_what_comes_of_a_check(tmp_path: Path, run: Any, status: Status, text: str, numbers: dict[str, int]) -> None:
    result = apart.attempt(check("one", run), place(tmp_path))
    assert (result.name, result.status, result.text, result.numbers) == ("one", status, text, numbers)
    assert result.is_bad == (status is Status.FAILED)


def test_what_checks_share_is_made_once_and_fails_for_all(tmp_path: Path) -> None:
    asked = []

    def make(_: Place) -> list[int]:
        asked.append(1)
        if len(asked) > 1:
            raise OSError("no server")
        return asked

    once, failing = Once(make), Once(make)
    assert once(place(tmp_path)) is once(place(tmp_path))
    for _ in range(2):
        with pytest.raises(OSError, match="no server"):
            failing(place(tmp_path))
    assert len(asked) == 2


# -- in a process of its own ---------------------------------------------------------------------------------------

CHILD = """
import json, os, subprocess, sys, time
told = sys.argv[sys.argv.index("--child") + 1]
def tell(name):
    print(json.dumps(dict(name=name, status="passed", text="", numbers={}, seconds=0.0)), file=open(told, "a"))
"""


def run_child(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, names: list[str], limit_s: float = 60
) -> list[Result]:
    script = tmp_path / "child.py"
    script.write_text(CHILD + textwrap.dedent(body))
    monkeypatch.setattr(apart, "this_program", lambda: [sys.executable, str(script)])
    made = [check(name, raising(AssertionError())) for name in names]
    return apart.run_apart(made, [], log=tmp_path / "logs" / "child.log", limit_s=limit_s, env={"PROVED": "1"})


def test_results_come_back_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = run_child(monkeypatch, tmp_path, "tell('b'); assert os.environ['PROVED']; tell('a')", ["a", "b"])
    assert [(result.name, result.status) for result in results] == [("a", "passed"), ("b", "passed")]


@pytest.mark.parametrize(
    ("dies", "why"),
    [
        ("print('no memory'); sys.exit(3)", "its process ended with status 3: no memory"),
        ("os.abort()", "its process ended with signal 6"),
        ("pass", "its process ended with status 0: it said nothing"),
    ],
)
def test_a_crash_keeps_what_was_told_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dies: str, why: str
) -> None:
    first, second = run_child(monkeypatch, tmp_path, f"tell('first')\n{dies}", ["first", "second"])
    assert first.status is Status.PASSED
    assert second.status is Status.FAILED
    assert second.text.startswith(why)


def test_a_hang_is_ended_with_all_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server leads a group of its own, and outlives a parent that dies."""
    body = """
        tell("first")
        server = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(server.pid, flush=True)
        time.sleep(600)
    """
    began = time.monotonic()
    first, second = run_child(monkeypatch, tmp_path, body, ["first", "second"], limit_s=2)
    assert (first.status, second.status) == (Status.PASSED, Status.TIMED_OUT)
    assert second.is_bad
    assert second.text == "took more than 0.0 minutes"
    assert time.monotonic() - began < 40
    pid = int((tmp_path / "logs" / "child.log").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_half_a_line_is_no_result(tmp_path: Path) -> None:
    file = tmp_path / "told"
    apart.run_here([check("whole", lambda _: Finding("yes"))], place(tmp_path), file)
    file.write_text(file.read_text() + '{"name": "half"')
    assert [result.name for result in apart.read(file)] == ["whole"]


# -- which checks --------------------------------------------------------------------------------------------------


def test_the_whole_form_has_more_and_names_are_single(tmp_path: Path) -> None:
    whole, short = (checks(place(tmp_path, H200, short=is_short)) for is_short in (False, True))
    names = [one.name for one in whole]
    assert len(set(names)) == len(names)
    assert {one.name for one in short} < set(names)
    assert names[:2] == ["environment", "drafts"]
    assert [name for name in names if name.startswith("parity")] == [
        f"parity {attention} page {size}" for attention in ("fa3", "flashinfer", "triton") for size in (1, 16)
    ]
    assert [one.name for one in short if one.name.startswith("parity")] == ["parity fa3 page 16"]


def test_checks_that_share_a_server_share_a_process(tmp_path: Path) -> None:
    together = [[one.name for one in part] for part in processes(checks(place(tmp_path)))]
    assert together[1] == ["drafts", "steps", "answers", "padding", "memory", "stages"]
    assert ["kernels", "bandwidth"] in together


def test_what_cannot_run_is_skipped_and_says_why(tmp_path: Path) -> None:
    one = check("one", raising(AssertionError()), needs=Needs.GPU)
    assert program.skip(one, place(tmp_path), 900) == "needs a GPU"
    assert program.skip(one, place(tmp_path, H200), 900) == ""
    assert program.skip(one, place(tmp_path, H200), 3) == "no time left of --minutes (3 s)"


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no check is called draft; --list names them"):
        program.chosen(place(tmp_path), ["draft"])


def test_a_child_is_told_all_but_the_names() -> None:
    own = ["--only", "drafts", "padding, every width", "--short", "--flags", "--only", "x"]
    assert program.without(own) == ["--short", "--flags", "--only", "x"]


def test_without_a_gpu_or_a_rehearsal_there_is_nothing_to_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SGLANG_DFLASH_REHEARSE", raising=False)
    monkeypatch.setattr(machine, "find_gpu", lambda: None)
    assert program.main(["--list"]) == 2
    assert "SGLANG_DFLASH_REHEARSE=sm90 rehearses one" in capsys.readouterr().err


def test_half_a_pair_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda: H200)
    with pytest.raises(ValueError, match="needs both --model-path and --draft-path"):
        machine.place_of(program.parse(["--model-path", "M"]))


def test_a_pair_of_ones_own_is_served_alone_and_with_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda: H200)
    options = program.parse(["--model-path", "M", "--draft-path", "D", "--flags", "--tp-size", "2"])
    own = machine.place_of(options)
    assert not own.side_by_side
    assert not place(Path(), H200).side_by_side
    assert place(Path()).side_by_side
    assert own.flags(own.main_pair, "fa3", 16) == ["--attention-backend", "fa3", "--page-size", "16", "--tp-size", "2"]
    assert not own.exact("triton")


# -- the document and the table ------------------------------------------------------------------------------------


def run_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statuses: list[Status], minutes: float) -> list[Result]:
    made = [check(f"check {i}", raising(AssertionError())) for i in range(len(statuses))]
    by_name = {one.name: status for one, status in zip(made, statuses, strict=True)}

    def run(able: list[Check], *_: Any, **__: Any) -> list[Result]:
        return [Result(one.name, by_name[one.name], "a | b") for one in able]

    monkeypatch.setattr(program, "run_apart", run)
    options = argparse.Namespace(minutes=minutes, folder=tmp_path)
    return program.run_all(made, place(tmp_path), options, [])


def document(tmp_path: Path, results: list[Result], gpu: Gpu | None = None) -> dict[str, Any]:
    made = [check(result.name, raising(AssertionError())) for result in results]
    return report.document(place(tmp_path, gpu), made, results, "sglang-dflash prove")


@pytest.mark.parametrize(
    ("status", "ok"),
    [(Status.PASSED, True), (Status.SKIPPED, True), (Status.FAILED, False), (Status.TIMED_OUT, False)],
)
def test_it_is_well_when_nothing_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: Status, ok: bool
) -> None:
    results = run_all(monkeypatch, tmp_path, [Status.PASSED, status], minutes=5)
    assert document(tmp_path, results)["ok"] is ok


def test_what_there_is_no_time_for_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = run_all(monkeypatch, tmp_path, [Status.PASSED], minutes=0.1)
    assert (results[0].status, "no time left" in results[0].text) == (Status.SKIPPED, True)


def test_the_table_tells_rehearsed_from_seen(tmp_path: Path) -> None:
    results = [
        Result("drafts", Status.PASSED, "none | changed\nat all"),
        Result("law", Status.TIMED_OUT, "long"),
        Result("speed", Status.SKIPPED, "needs a GPU"),
    ]
    made = document(tmp_path, results)
    assert made["level"] == "R: sm90 rehearsed on a CPU"
    assert report.markdown(made).splitlines()[2:] == [
        "| drafts | drafts holds | yes | R (sm90) | none \\| changed at all | – |",
        "| law | law holds | **no**: timed out | R (sm90) | long | – |",
        "| speed | speed holds | – | – | needs a GPU | – |",
    ]
    seen = document(tmp_path, results, H200)
    assert seen["level"] == "G: seen on NVIDIA H200"
    assert "| yes | G (NVIDIA H200) |" in report.markdown(seen)
    json.dumps(seen, allow_nan=False)


# -- entry points --------------------------------------------------------------------------------------------------


def test_entry_points_are_found_where_they_were_written(tmp_path: Path) -> None:
    for _ in range(2):  # again changes nothing
        info, package, kernels = install(tmp_path)
    found = next(d for d in distributions(path=[str(tmp_path)]) if d.metadata["Name"] == "sglang-dflash")
    written = {point.group: (point.name, point.value) for point in found.entry_points}
    assert written == ENTRY_POINTS
    assert (package / "prove").is_dir()
    assert (kernels / "accept.py").is_file()
    assert info.parent == tmp_path


def test_it_does_not_overwrite_what_is_no_link(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "sglang_dflash")
    with pytest.raises(ValueError, match="exists and is no link"):
        list(install(tmp_path))
