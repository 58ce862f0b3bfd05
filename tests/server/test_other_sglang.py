"""SGLang of another version in the environment: launches without DFLASH are left alone, others are refused.

This machine has no GPU, so an SGLang without this package's platform ends early. A launch without DFLASH must end
exactly as it does without this package.
"""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_dflash.pairs.tiny.pairs import DENSE
from tests.tools.stand_ins import another_version

NONE = "SGLANG_PLUGINS"  # selects plugins by name
LAUNCH = ("-m", "sglang.launch_server", "--model-path", str(DENSE.target), "--port", "31733", "--device", "cpu")
DFLASH = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DENSE.draft))
ENGINE = f"""
import sglang
if __name__ == "__main__":
    sglang.Engine(model_path={str(DENSE.target)!r}, device="cpu", speculative_algorithm="DFLASH",
                  speculative_draft_model_path={str(DENSE.draft)!r})
"""
ROUTER = ("-m", "sglang_router.launch_server", *LAUNCH[2:], *DFLASH)


def run(path: Path, words: Sequence[str], timeout: float = 1200, **variables: str) -> tuple[int, str]:
    """Run Python with `path` first on its path, and return the exit status and the output.

    Raises:
        subprocess.TimeoutExpired: Python ran for longer than `timeout` seconds.
    """
    env = os.environ | {"PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | variables
    ended = subprocess.run(
        [sys.executable, *words], env=env, cwd=path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=timeout,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def last_error(text: str) -> str:
    """Return the last line that names an error, without numbers, which may be times, ports or process ids."""
    lines = [line for line in text.splitlines() if re.match(r"^[\w.]*(Error|Exception|Mismatch)\b", line)]
    return re.sub(r"\d+", "N", lines[-1] if lines else "no error")


def require_refusal(path: Path, version: str) -> None:
    (path / "engine.py").write_text(ENGINE)
    refusal = f"HostMismatch: sglang {version} is installed; sglang-dflash .* needs sglang .*; install that release, or"
    with ThreadPoolExecutor(2) as two:
        for code, text in two.map(lambda words: run(path, words), ((*LAUNCH, *DFLASH), ("engine.py",))):
            assert code != 0
            assert re.search(refusal, text), text[-3000:]


def require_same_end(path: Path, version: str) -> None:
    """A launch without DFLASH ends as it does without this package, after one warning."""
    with ThreadPoolExecutor(2) as two:
        ours, theirs = two.map(lambda variables: run(path, LAUNCH, **variables), ({}, {NONE: "none"}))
    assert (ours[0], last_error(ours[1])) == (theirs[0], last_error(theirs[1]))
    assert ours[1].count(f"sglang {version} is installed") == 1
    assert "only launches with DFLASH are refused" in ours[1]


def test_another_version_ends_only_launches_with_dflash(tmp_path: Path) -> None:
    path = another_version.write(tmp_path)
    require_refusal(path, another_version.VERSION)
    require_same_end(path, another_version.VERSION)


@pytest.mark.full
def test_a_routers_worker_is_refused(tmp_path: Path) -> None:
    """The router itself waits for its workers, so it is killed."""
    with pytest.raises(subprocess.TimeoutExpired) as ended:
        run(another_version.write(tmp_path), ROUTER, timeout=60)
    text = ended.value.stdout or b""
    assert f"HostMismatch: sglang {another_version.VERSION} is installed".encode() in text


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.5.22", "0.5.21"])
def test_a_real_release_ends_only_launches_with_dflash(version: str, tmp_path: Path) -> None:
    """The release's wheel, unpacked before the installed SGLang on Python's path."""
    fetch = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path))
    subprocess.run([*fetch, f"sglang=={version}"], check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    require_refusal(tmp_path / "site", version)
    require_same_end(tmp_path / "site", version)
