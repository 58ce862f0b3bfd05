"""A battery that is interrupted is continued: tests that have passed are left out, failed ones run again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("n", [1, 2, 3])
def test_it(n):
    if n == 3:
        pytest.skip("never")
    assert n == 1 or Path(__file__).with_name("fixed").exists()
"""


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_is_continued(processes: str, tmp_path: Path) -> None:
    file, passed = ROOT / "tests" / f"test_resumed_{os.getpid()}_{processes}.py", tmp_path / "passed"
    file.write_text(TESTS)
    fixed = file.with_name("fixed")

    def run() -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", processes, "-p", "no:cacheprovider", str(file)], cwd=ROOT,
            env=os.environ | {"TESTS_PASSED": str(passed)}, stdout=subprocess.PIPE, text=True, timeout=300,
        )  # fmt: skip
        return ended.stdout

    try:
        assert "1 failed, 1 passed, 1 skipped" in run()
        assert sorted(line.partition("::")[2] for line in passed.read_text().split()) == ["test_it[1]", "test_it[3]"]
        fixed.touch()
        assert "1 passed" in run()
        assert len(passed.read_text().split()) == 3
    finally:
        for path in (file, fixed):
            path.unlink(missing_ok=True)
