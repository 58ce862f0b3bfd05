"""Two checkouts in one run: an arm's PYTHONPATH really gives package and kernels of the other one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.bench import checkouts
from sglang_dflash.servers.errors import ServerError

ROOT = Path(__file__).parents[3]  # whose editable installation, and working directory, would be found otherwise
LOOK = (
    "import json, sglang_dflash, sglang_dflash_kernels.x as x; print(json.dumps([sglang_dflash.__file__, x.__file__]))"
)


@pytest.fixture(params=["kernels", "sglang_dflash_kernels"], ids=["checkout", "pip install --target"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Another checkout, as far as it is imported here."""
    package, kernels = tmp_path / "other" / "sglang_dflash", tmp_path / "other" / request.param
    for folder in (package, kernels):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (kernels / "x.py").touch()
    return tmp_path / "other"


@pytest.mark.parametrize("cwd", [ROOT, Path("/")])
def test_package_and_kernels_come_from_there(other: Path, tmp_path: Path, cwd: Path) -> None:
    env = checkouts.environment({"PYTHONPATH": str(other), "A": "b"}, tmp_path / "links")
    assert env["A"] == "b"
    said = subprocess.run(
        [sys.executable, "-c", LOOK], env=os.environ | env, cwd=cwd, capture_output=True, text=True, check=True
    )
    assert all(Path(file).resolve().is_relative_to(other) for file in json.loads(said.stdout))


def test_half_of_one_is_refused(other: Path, tmp_path: Path) -> None:
    for folder in ("kernels", "sglang_dflash_kernels"):
        if (other / folder).exists():
            (other / folder).rename(other / "elsewhere")
    with pytest.raises(ServerError, match=f"PYTHONPATH={other}: package and kernels are not imported from there"):
        checkouts.environment({"PYTHONPATH": str(other)}, tmp_path / "links")


def test_other_paths_are_left_alone(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(tmp_path)}
    assert checkouts.environment(env, tmp_path / "links") == env
    assert checkouts.environment({}, tmp_path / "links") == {}
    assert not (tmp_path / "links").exists()
