"""`sglang-dflash prove` as a runner: results, crashes, hangs, limits, the table and the JSON document."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.tools.prove import __main__ as program
from sglang_dflash.tools.prove import machine
from sglang_dflash.tools.prove.machine import Gpu
from sglang_dflash.tools.prove.report import markdown
from tests.fixtures.processes import is_alive

H200 = Gpu("NVIDIA H200", "sm90", 141 << 30)
CHECKS = """
import ctypes, os, subprocess, time
import pytest
from sglang_dflash.tools.prove.plugin import Finding, check

LIMIT = 0.05  # minutes

@check("holds", "one is one", 1, short=True, expected="1")
def check_holds(place, found):
    found(Finding("1 |\\n1", {"n": {1: place.device}}))

@check("does not hold", "two is three", 1, short=True)
def check_does_not_hold(found):
    found(Finding("2 of 3", {"n": 2}, False))

@check("breaks", "", 1, short=True)
def check_breaks():
    raise RuntimeError("CUDA error")

@check("crashes", "", 1, short=True)
def check_crashes():
    os.abort()

@check("hangs", "", LIMIT, short=True)
@pytest.mark.parametrize("server", ["a"])
def check_hangs(server):
    print("left behind:", subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    time.sleep(600)

@check("same server", "", 1, short=True)
@pytest.mark.parametrize("server", ["a"])
def check_same_server(server, found):
    found(Finding("", {}))

@check("holds the interpreter", "", LIMIT, short=True)
def check_holds_the_interpreter():
    ctypes.PyDLL(None).sleep(600)

@check("times", "", 1, short=True, gpu=True)
def check_times():
    assert False

@check("last", "", 1, short=True)
def check_last(found):
    found(Finding("all the same", {}))

@check("whole form", "", 1)
def check_whole_form(found):
    found(Finding("", {}))
"""
RUN = """
import sys
from pathlib import Path
from sglang_dflash.tools.prove import __main__ as program
from sglang_dflash.tools.prove.__main__ import main
program.FILES = [Path("checks.py")]
"""


def prove(folder: Path, *words: str, program: str = RUN) -> subprocess.CompletedProcess[str]:
    """Run `sglang-dflash prove` in `folder`, on the checks in its checks.py."""
    env = os.environ | {"SGLANG_DFLASH_REHEARSE": "sm90"}
    command = [sys.executable, "-c", f"{program}\nsys.exit(main(sys.argv[1:]))", "--out", "prove.json", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((folder / "prove.json").read_text())["results"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prove")
    (folder / "checks.py").write_text(CHECKS)
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> subprocess.CompletedProcess[str]:
    return prove(folder, "--short")


def test_each_check_has_its_result(folder, ended):
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert {name: (row["status"], row["text"]) for name, row in results(folder).items()} == {
        "holds": ("passed", "1 |\n1"),
        "does not hold": ("failed", "2 of 3"),
        "breaks": ("failed", "RuntimeError: CUDA error"),
        "crashes": ("failed", "its process crashed; see checks.log after the line `-- crashes`"),
        "hangs": ("timed out", "took more than 0.1 minutes"),
        "same server": ("skipped", "skipped, because hangs timed out on the same server"),
        "holds the interpreter": ("timed out", "took more than 0.1 minutes"),
        "times": ("skipped", "needs a GPU"),
        "last": ("passed", "all the same"),
    }
    assert "Fatal Python error: Aborted" in (folder / "prove-logs" / "checks.log").read_text()


def test_document_has_levels_numbers_and_expectations(folder, ended):
    document = json.loads((folder / "prove.json").read_text())
    assert (document["level"], document["ok"]) == ("R: sm90 rehearsed on a CPU", False)
    first, second, *_ = document["results"]
    assert (first["level"], first["proves"], first["expected"]) == ("R", "one is one", "1")
    assert (first["numbers"], second["numbers"]) == ({"n": {"1": "sm90"}}, {"n": 2})


def test_table_names_level_and_verdict(folder, ended):
    document = json.loads((folder / "prove.json").read_text())
    table = markdown(document)
    assert table in ended.stdout
    assert table.splitlines()[2:4] == [
        "| holds | one is one | yes | R (sm90) | 1 \\| 1 | 1 |",
        "| does not hold | two is three | **no** | R (sm90) | 2 of 3 | – |",
    ]
    assert "| hangs |  | **no**: timed out |" in table
    assert "| times |  | – | – | needs a GPU | – |" in table
    document["results"][0]["level"] = "G"
    assert "| yes | G (NVIDIA H200) |" in markdown(document | {"gpu": H200._asdict()})


def test_process_left_by_a_hang_is_ended(folder, ended):
    log = (folder / "prove-logs" / "checks.log").read_text()
    pid = int(log.partition("left behind: ")[2].split()[0])
    assert not is_alive(pid)


def test_options_of_pytest_are_passed_on(folder):
    ended = prove(folder, "-x", "-k", "hold and not interpreter or last")
    assert ended.returncode == 1
    found = {name: row["status"] for name, row in results(folder).items()}
    assert found == {"holds": "passed", "does not hold": "failed", "last": "skipped"}
    ended = prove(folder, "--only", "last", "whole form", "--minutes", "5")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed" in ended.stdout


def test_without_time_nothing_runs(folder):
    assert prove(folder, "--only", "last", "--minutes", "0.1").returncode == 0
    assert results(folder)["last"]["text"].endswith("and no check starts with less than 20 s; raise --minutes")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "draft"], "no check is called draft; --list names them"),
        (["--short", "--only", "whole form"], "whole form: not in the short form; leave out --short"),
        (["--shrot"], "unrecognized arguments: --shrot"),
        (["--model-path", "M"], "found one of --model-path and --draft-path; give both"),
    ],
)
def test_wrong_arguments_are_refused(folder, words, message):
    ended = prove(folder, *words)
    assert ended.returncode == 2
    assert message in ended.stderr


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(program, "find_spec", lambda name: name if name == "pytest" else None)
    assert program.main(["--list"]) == 2
    needed = "prove: not installed: pytest-timeout, pytest-xdist; pip install pytest-timeout pytest-xdist\n"
    assert capsys.readouterr().err == needed


def test_nothing_runs_without_a_gpu_or_emulation(monkeypatch, capsys):
    monkeypatch.delenv("SGLANG_DFLASH_REHEARSE", raising=False)
    monkeypatch.setattr(machine, "find_gpu", lambda: None)
    assert program.main([]) == 2
    assert "set SGLANG_DFLASH_REHEARSE=sm90 to emulate one" in capsys.readouterr().err
    place = machine.place_of(program.parse(["--list"]))
    assert (place.gpu, place.device, place.is_assumed) == (None, "sm90", True)
    monkeypatch.setenv("SGLANG_DFLASH_REHEARSE", "sm90")
    assert not machine.place_of(program.parse(["--list"])).is_assumed


def test_a_list_without_a_gpu_names_the_assumed_one(folder):
    env = {name: value for name, value in os.environ.items() if name != "SGLANG_DFLASH_REHEARSE"}
    code = (
        f"{RUN}\nfrom sglang_dflash.tools.prove import machine\n"
        "machine.find_gpu = lambda: None\nsys.exit(main(['--list']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0
    assert "prove: found no GPU; these are the checks of sm90. SGLANG_DFLASH_REHEARSE=sm100" in ended.stderr
    assert ended.stdout.startswith("holds ")


def test_a_given_pair_is_served_alone_with_its_flags(monkeypatch):
    monkeypatch.delenv("SGLANG_DFLASH_REHEARSE", raising=False)
    monkeypatch.setattr(machine, "find_gpu", lambda: H200)
    options = program.parse(["--model-path", "M", "--draft-path", "D", "--flags", "--tp-size", "2"])
    with pytest.raises(ValueError, match=r"--model-path M is not on this machine, .* run `hf download M`"):
        machine.place_of(options)
    monkeypatch.setattr(machine, "try_to_load_from_cache", lambda name, file: f"cache/{name}/{file}")
    own, tiny = machine.place_of(options), machine.place_of(program.parse(["-k", "distribution"]))
    assert own.flags("fa3", 16) == ["--attention-backend", "fa3", "--page-size", "16", "--tp-size", "2"]
    assert tiny.side_by_side
    assert not own.side_by_side
    assert replace(own, gpu=None).flags("fa3", 16)[:2] == ["--device", "cpu"]
    assert not own.exact
    assert not tiny.exact
    assert "bfloat16" in tiny.flags("triton")


def listed(folder: Path, *words: str) -> list[str]:
    ended = prove(folder, "--list", *words, program="import sys; from sglang_dflash.tools.prove.__main__ import main")
    assert ended.returncode == 0, ended.stderr
    return [line[:28].strip() for line in ended.stdout.splitlines()]


@pytest.mark.ci
def test_list_has_the_most_important_checks_first(tmp_path):
    whole, short = listed(tmp_path), listed(tmp_path, "--short")
    assert list(tmp_path.iterdir()) == []
    assert whole[: len(short)] == short
    assert short[:3] == ["environment", "drafts", "steps"]
    assert [name for name in short if name.startswith("parity")] == ["parity fa3 page 16"]
    assert {name for name in whole if name.startswith("parity")} == {
        f"parity {attention} page {size}" for attention in ("fa3", "flashinfer", "triton") for size in (1, 16)
    }
    assert {"drafts, every width", "answers, copies", "distribution", "speed"} <= set(whole)
