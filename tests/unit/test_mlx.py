"""The MLX backend must pass its checks in an environment without torch and SGLang. Its oracle must be reproducible."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sglang_dflash.errors import NoModelError
from sglang_dflash.pairs.smollm2 import smollm2
from sglang_dflash.tools.bench import prompts as data
from sglang_dflash.tools.demo.pairs import SMOLLM2_DRAFT
from tests.engines.cases import CASES, IN_FP32, ORACLE, Case
from tests.engines.write_oracle import reference

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", IN_FP32)
def test_the_oracle_is_reproducible(name: str) -> None:
    wanted = json.loads(ORACLE.read_text())[name][:1]
    assert json.loads(json.dumps(list(reference(CASES[name], 1)))) == wanted


@pytest.mark.full
def test_mlx_output_equals_plain_torch(tmp_path: Path) -> None:
    """Run `tests/engines/mlx_checks.py` with the packages of the extra `mlx`."""
    uv, python = [sys.executable, "-m", "uv"], tmp_path / "environment" / "bin" / "python"
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["mlx"]
    into = ["--python", str(python), "--constraint", str(ROOT / "env" / "constraints.txt")]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "environment"], check=True)
    subprocess.run([*uv, "pip", "install", "--quiet", *into, *extra, "pytest"], check=True)
    checks = [python, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "tests/engines/mlx_checks.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "SMOLLM2": str(smollm2_case(tmp_path / "smollm2"))}
    done = subprocess.run(checks, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:]


def smollm2_case(folder: Path) -> Path:
    """Write target, draft and `oracle.json` of SmolLM2 into `folder`, which stays empty if the target is not found."""
    folder.mkdir()
    try:
        (folder / "target").symlink_to(smollm2.checkpoint())
    except NoModelError:
        return folder
    (folder / "draft").symlink_to(SMOLLM2_DRAFT)
    (prompt,) = data.load(data.CHATS, 1).prompts
    (edit,) = data.load(data.EDITS, 1).prompts
    steps = list(reference(Case(str(folder)), 2, [list(prompt), list(edit)]))
    (folder / "oracle.json").write_text(json.dumps(steps))
    return folder
