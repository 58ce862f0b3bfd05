"""Programs that use SGLang's `Engine`: answers, refusals, and several engines in one process.

Variables of this package may change between two engines of a process. The second engine must use the new ones in all
processes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dflash.pairs.tiny import pairs as tiny
from tests.server.lib.engine import HARMFUL
from tests.server.test_doors import FIELDS, N_NEW, N_PROMPTS, ROOT, WIDE

pytestmark = pytest.mark.full
RUNS = {
    "wide": WIDE,
    "narrow": {"SGLANG_DFLASH_WIDTHS": "1,8", "SGLANG_DFLASH_COPY": "off"},
    "default": {},
    "stock": {"SGLANG_DFLASH_WORKER": "stock"},
    "emulated": {"SGLANG_DFLASH_REHEARSE": "sm90"},
}
WIDTHS = {"wide": {"1", "32"}, "narrow": {"1", "8"}, "default": {*map(str, range(1, 17))}}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, questions: Callable) -> dict[str, Any]:
    """Return the reports of one process that builds an engine for each row of `RUNS`."""
    report = tmp_path_factory.mktemp("engine") / "report.json"
    order = {"fields": FIELDS, "prompts": questions(N_PROMPTS, "dense"), "n_new": N_NEW, "runs": [*RUNS.values()]}
    command = [sys.executable, "-m", "tests.server.lib.engine", json.dumps(order), str(report)]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | tiny.ENV, text=True, capture_output=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return dict(zip(RUNS, json.loads(report.read_text()), strict=True))


@pytest.mark.parametrize("run", ["wide", "narrow", "default"])
def test_answers_are_right(run: str, reports: dict[str, Any], questions: Callable, reference: Callable) -> None:
    expected = [reference(prompt, N_NEW, "dense") for prompt in questions(N_PROMPTS, "dense")]
    assert [reports[run][way] for way in ("alone", "batch", "async")] == [expected] * 3
    assert reports[run]["alive"] == expected[0]


@pytest.mark.parametrize("run", ["wide", "narrow", "default"])
def test_requests_are_checked(run: str, reports: dict[str, Any]) -> None:
    errors = reports[run]["errors"]
    assert len(errors) == len(HARMFUL)
    assert "input_ids has 1024, which is no token of this model" in errors[0]
    assert "top_k is 2147483648; send at most" in errors[1]


def test_each_engine_uses_the_present_variables(reports: dict[str, Any]) -> None:
    for run, widths in WIDTHS.items():
        state = reports[run]["dflash"]
        assert set(state["width"]["n_steps"]) <= widths
        assert state["widest"] == (32 if run == "wide" else 16)
    assert reports["stock"]["dflash"] is None
    assert reports["emulated"]["refused"].startswith("SGLANG_DFLASH_REHEARSE was off when SGLang was imported")
