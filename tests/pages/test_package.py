"""The built package has the right files, and an installed `sglang-dflash` works outside the clone."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from sglang_dflash import __version__
from tests.fixtures.guide import ROOT

UV = [sys.executable, "-m", "uv"]


def run(*command: str | Path, cwd: Path, timeout_s: float = 300, **env: str) -> str:
    """Run a command without the inherited PYTHONPATH and VIRTUAL_ENV, require success, and return its output."""
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(
        list(map(str, command)), cwd=cwd, env=alone | env, capture_output=True, text=True, timeout=timeout_s
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(*UV, "build", "--out-dir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"sglang_dflash-{__version__}-py3-none-any.whl"


def tracked(folder: str) -> set[str]:
    return set(run("git", "ls-files", folder, cwd=ROOT).split())


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kernels = {name.replace("kernels/", "sglang_dflash_kernels/") for name in tracked("kernels")}
    assert names == tracked("sglang_dflash") | {name for name in kernels if name.endswith(".py")}


def test_source_distribution_has_the_sources_of_the_wheel(built: Path) -> None:
    with tarfile.open(built / f"sglang_dflash-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked("sglang_dflash") | {"README.md", "LICENSE", "pyproject.toml"} <= names


def test_outside_the_clone_the_command_has_its_files(wheel: Path, tmp_path: Path) -> None:
    """Install the wheel without dependencies, which this environment has. PYTHONPATH puts the wheel first."""
    folder = tmp_path / "installed"
    run(*UV, "pip", "install", "--quiet", "--no-deps", "--target", folder, wheel, cwd=tmp_path)
    assert (folder / "bin" / "sglang-dflash").is_file()

    def output_of(*words: str) -> str:
        environment = {"PYTHONPATH": str(folder), "SGLANG_DFLASH_REHEARSE": "sm90"}
        return run(sys.executable, "-m", "sglang_dflash", *words, cwd=tmp_path, **environment)

    assert output_of("--version").strip() == __version__
    assert str(folder) in output_of("docs")
    assert output_of("docs", "metrics").startswith("# Metrics")
    assert json.loads(output_of("dashboard"))["panels"]
    assert "z-lab/Qwen3.5-27B-DFlash" in output_of("recipe", "qwen3.5-27b", "--gpu", "h200")
    assert "requests at once" in output_of("check", "--model", "Qwen3.5-27B", "--gpu-memory", "140.4")
    assert "parity fa3 page 16" in output_of("prove", "--list")


@pytest.mark.full
def test_an_empty_environment_serves(wheel: Path, tmp_path: Path) -> None:
    """Install into a new environment as users do. `check` must find no fault, and `demo` must show equal answers."""
    environment = tmp_path / "environment"
    run(*UV, "venv", "--quiet", "--python", sys.executable, environment, cwd=tmp_path)
    pins = ["--constraint", ROOT / "env" / "constraints.txt"]
    python = environment / "bin" / "python"
    run(*UV, "pip", "install", "--quiet", "--python", python, *pins, wheel, cwd=tmp_path, timeout_s=1200)
    command = environment / "bin" / "sglang-dflash"
    assert [line.split()[0] for line in run(command, "check", cwd=tmp_path).splitlines()] == ["ok"] * 4
    (tiny,) = environment.glob("lib/*/site-packages/sglang_dflash/assets/tiny")
    flags = f"--device cpu --attention-backend torch_native --model-path {tiny}/target --max-total-tokens 1024 "
    dflash = f"--speculative-algorithm DFLASH --speculative-draft-model-path {tiny}/draft"
    lines = run(command, "check", *(flags + dflash).split(), cwd=tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == [*["ok"] * 7, "note"], "the note: the pairing was not tested"
    shown = run(command, "demo", "--once", "--port", "29900", cwd=tmp_path, timeout_s=600)
    assert "acceptance length" in shown
    assert "the same questions with and without speculation" in shown


def test_the_changelog_has_the_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
