"""`sglang-dflash prove` under GPU emulation: all checks pass, and a fault makes the right checks fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.guide import ROOT
from tests.tools import parameters

COPIES = ("drafts, copies", "steps, copies", "answers, copies")
NEED_A_GPU = {"bandwidth", "draft graph", "one token"}
ONE_SERVER = ("drafts", "steps", "answers", "padding", "memory", "stages")
FAULTS = Path(__file__).parent / "faults"
MINUTES = 14  # time limit of `prove`, many times its duration on an idle machine


def prove(
    tmp_path: Path, *words: str, env: dict[str, str] | None = None, form: tuple[str, ...] = ("--short",)
) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "prove.json"
    command = [sys.executable, "-m", "sglang_dflash.tools.prove", *form, "--minutes", str(MINUTES), "--out", str(out)]
    environment = os.environ | {"SGLANG_DFLASH_REHEARSE": "sm90"} | (env or {})
    ended = subprocess.run([*command, *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.exists(), ended.stdout + ended.stderr
    document = json.loads(out.read_text())
    assert document["level"] == "R: sm90 rehearsed on a CPU"
    assert "| R (sm90) |" in ended.stdout
    return ended.returncode, document


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["name"]: result for result in document["results"]}


@pytest.mark.full
def test_checks_of_one_server_pass(tmp_path: Path) -> None:
    status, document = prove(tmp_path, "--only", *ONE_SERVER)
    results = by_name(document)
    assert {name: result["status"] for name, result in results.items()} == dict.fromkeys(ONE_SERVER, "passed"), results
    assert status == 0
    steps = results["drafts"]["numbers"]["steps"]
    assert [(row["requests"], row["width"]) for row in steps if row["steps"] > row["served"]] == [
        (n, 16) for n in (1, 2, 3, 4, 7, 8)
    ]
    assert sum(row["served"] for row in steps) > 20
    assert sum(row["padded"] for row in steps) > 0


@pytest.mark.full
def test_copies_are_proved_too(tmp_path: Path) -> None:
    status, document = prove(tmp_path, "--only", *COPIES, form=())
    results = by_name(document)
    assert {name: result["status"] for name, result in results.items()} == dict.fromkeys(COPIES, "passed"), results
    assert status == 0


@pytest.mark.full
def test_the_short_form(tmp_path: Path) -> None:
    status, document = prove(tmp_path)
    results = by_name(document)
    assert {name for name, result in results.items() if result["status"] == "skipped"} == NEED_A_GPU
    assert {result["status"] for result in results.values()} == {"passed", "skipped"}, results
    assert status == 0


@pytest.mark.full
def test_drafts_left_in_the_graph_are_found(tmp_path: Path) -> None:
    """Answers stay right with this fault: the target's replay overwrites the drafts, and wrong drafts are rejected."""
    fault = parameters.path_with(FAULTS) | {"FAULT": "drafts_in_the_graph"}
    status, document = prove(tmp_path, "--only", "drafts", "steps", "answers", env=fault)
    results = by_name(document)
    assert status == 1
    statuses = {name: result["status"] for name, result in results.items()}
    assert statuses == {"drafts": "failed", "steps": "failed", "answers": "passed"}
    assert "other drafts after the target's replay" in results["drafts"]["text"]
