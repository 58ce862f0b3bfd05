"""Programs that use SGLang's `Engine`: answers, refusals, several engines in one process, and SGLang's benchmarks.

Variables of this package may change between two engines of a process. The second engine must use the new ones in all
processes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.tiny import pairs as tiny
from tests.server.lib.engine import HARMFUL
from tests.server.test_doors import FIELDS, N_NEW, N_PROMPTS, ROOT, WIDE, flags

pytestmark = pytest.mark.full
N_TEXTS = 8
RUNS = {
    "wide": WIDE,
    "narrow": {"SGLANG_DFLASH_WIDTHS": "1,8", "SGLANG_DFLASH_COPY": "off"},
    "default": {},
    "stock": {"SGLANG_DFLASH_WORKER": "stock"},
    "emulated": {"SGLANG_DFLASH_REHEARSE": "sm90"},
}
WIDTHS = {"wide": {"1", "32"}, "narrow": {"1", "8"}, "default": {*map(str, range(1, 17))}}


def run_program(module: str, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | tiny.ENV | env
    return subprocess.run(
        [sys.executable, "-m", module, *argv], cwd=ROOT, env=variables, text=True, capture_output=True, timeout=1200
    )


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, questions: Callable) -> dict[str, Any]:
    """Return the reports of one process that builds an engine for each row of `RUNS`."""
    report = tmp_path_factory.mktemp("engine") / "report.json"
    order = {"fields": FIELDS, "prompts": questions(N_PROMPTS, "dense"), "n_new": N_NEW, "runs": [*RUNS.values()]}
    ended = run_program("tests.server.lib.engine", json.dumps(order), str(report))
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


def test_offline_throughput_speculates(tmp_path: Path) -> None:
    """SGLang's benchmark resolves the arguments itself, and hands them to an engine."""
    texts, result = tmp_path / "texts.json", tmp_path / "result.json"
    turns = [{"value": f"Spell the words candle and castle, {i} times."} for i in range(2)]
    texts.write_text(json.dumps([{"conversations": turns}] * N_TEXTS))
    options = ["--dataset-path", texts, "--sharegpt-output-len", 16, "--skip-warmup", "--result-filename", result]
    ended = run_program("sglang.benchmark.offline_throughput", *flags(FIELDS), *map(str, options), **WIDE)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert " serves DFLASH: block 16, verify widths 1/32, n-gram copies on" in ended.stderr
    found = json.loads(result.read_text())
    assert (found["successful_requests"], found["total_output_tokens"]) == (N_TEXTS, 16 * N_TEXTS)
