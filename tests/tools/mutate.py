"""Mistakes made on purpose: each row of tests/mutations/*.toml edits a copy of the tree, and its test must fail.

    python -m tests.tools.mutate            # all rows, two at a time
    python -m tests.tools.mutate gdn_verify # rows whose file name or description has this word

A row names one edit of one file, and one or more tests. `old` must occur once in the file. With the edit, at least one
of the tests must fail. The tests start no server. `make test` runs them without the edit, and they must pass.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "tests" / "mutations"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".run", ".gpu", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"
)
LIMIT_S = 300  # longest run of a row's tests
FAILED, CRASHED = 1, 2  # exit statuses of pytest: a test failed; a test could not be collected


class Mutation(NamedTuple):
    """One edit of one file.

    Attributes:
        file: path from the root of the tree.
        old: text that occurs once in the file; `new` replaces it.
        test: pytest nodes, separated by spaces. At least one fails with the edit.
        what: sentence that states the mistake.
    """

    file: str
    old: str
    new: str
    test: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"

    def apply(self, tree: Path) -> str:
        """Edit the file below `tree`; return its text before the edit."""
        text = (tree / self.file).read_text()
        if text.count(self.old) != 1:
            raise SystemExit(f"{self}: {self.old!r} occurs {text.count(self.old)} times, not once; fix the row")
        (tree / self.file).write_text(text.replace(self.old, self.new))
        return text


def read(tables: Path = TABLES) -> Iterator[Mutation]:
    for path in sorted(tables.glob("*.toml")):
        yield from (Mutation(**row) for row in tomllib.loads(path.read_text())["mutation"])


def status(mutation: Mutation, tree: Path, env: dict[str, str]) -> int:
    """Return pytest's exit status with the edit in `tree`, or `FAILED` after `LIMIT_S`. The file is restored."""
    before = mutation.apply(tree)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *mutation.test.split()]
    try:
        return subprocess.run(command, cwd=tree, env=env, capture_output=True, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return FAILED  # a test that hangs counts as one that fails
    finally:
        (tree / mutation.file).write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutate", description=__doc__.splitlines()[0])
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    mutations = [mutation for mutation in read() if asked.word in str(mutation)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.processes) as pool:
        free: SimpleQueue[tuple[Path, dict[str, str]]] = SimpleQueue()
        for i in range(asked.processes):
            tree = Path(folder).resolve() / str(i)
            shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
            links = tree / "links"  # without it, an editable installation would import the kernels of ROOT
            links.mkdir()
            (links / "sglang_dflash_kernels").symlink_to(tree / "kernels")
            path = {"PYTHONPATH": f"{links}{os.pathsep}{tree}", "PYTHONSAFEPATH": "1"}
            free.put((tree, os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | path))

        def detected(mutation: Mutation) -> bool:
            tree, env = free.get()
            try:
                found = status(mutation, tree, env)
                return found in (FAILED, CRASHED) or found < 0  # negative: a signal, as after a write out of bounds
            finally:
                free.put((tree, env))

        survivors = 0
        for mutation, killed in zip(mutations, pool.map(detected, mutations), strict=True):
            survivors += not killed
            print("killed  " if killed else "SURVIVED", mutation, flush=True)
    print(f"{len(mutations) - survivors} killed, {survivors} survived")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
