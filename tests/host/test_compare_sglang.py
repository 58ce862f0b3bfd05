"""Comparison of two releases of SGLang, on two small packages with one change of each kind."""

from pathlib import Path

import pytest

from sglang_dflash.engine.host import source
from sglang_dflash.engine.host.names import Name
from tests.tools import compare_sglang

OLD = '''
class Pool:
    """Hold slots."""

    size: int = 4

    def __init__(self, size):
        self.size = size

    def take(self, count):
        return count

    def give(self, slot: int):
        return slot  # the last

def fill(pool, value): return value

def drop(pool): return pool

def stay(pool): return pool
'''
NEW = '''
class Pool(dict):
    """Hold slots in pages."""

    size: int = 4

    def __init__(self, size):
        self.size, self.page = size, 1

    def take(self, count, page=1):
        return count

    def give(self, slot):
        """Return a slot."""
        return slot

def fill(pool, value): return value + 1

def stay(pool): return pool

def join(pool): return pool
'''
NAMES = (
    Name("sglang.srt.pool", "Pool", "size page take give"),
    Name("sglang.srt.pool", "fill", "pool"),
    Name("sglang.srt.pool", "drop"),
    Name("sglang.srt.pool", "stay", "pool"),
    Name("sglang.srt.pool", "join"),
    Name("sglang.srt.tank", "Tank"),
)
EXPECTED = [
    "gone        sglang.srt.pool.drop",
    "signature   sglang.srt.pool.Pool:  -> dict",
    "signature   sglang.srt.pool.Pool.take: (self, count) -> (self, count, page=1)",
    "body        sglang.srt.pool.fill",
    "new         sglang.srt.pool.Pool: page",
    "new         sglang.srt.pool.join",
]


def release(folder: Path, text: str) -> Path:
    (folder / "sglang" / "srt").mkdir(parents=True)
    (folder / "sglang" / "srt" / "pool.py").write_text(text)
    return folder


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(compare_sglang, "SECTIONS", {"served": NAMES})
    monkeypatch.setattr(compare_sglang, "BUILT_IN", ("sglang.srt.pool",))
    return release(tmp_path / "old", OLD), release(tmp_path / "new", NEW)


def test_each_kind_of_change_is_found(releases: tuple[Path, Path]) -> None:
    """Comments, docstrings and annotations are no changes."""
    old, new = (compare_sglang.contract(folder) for folder in releases)
    assert list(map(str, compare_sglang.changes(old, new))) == EXPECTED
    assert compare_sglang.changes(old, old) == []


def test_the_report_counts_the_changes(releases: tuple[Path, Path]) -> None:
    text = compare_sglang.report(*releases)
    assert "The host contract: 7 names, 1 gone, 2 signature, 1 body, 2 new" in text
    # Every function and method of the built-in worker's modules counts, needed or not.
    assert "SGLang's own DFLASH: 8 names, 1 gone, 2 signature, 2 body, 1 new" in text
    assert "body        sglang.srt.pool.Pool.__init__" in text


def test_the_installed_sglang_is_read_again_afterwards(releases: tuple[Path, Path]) -> None:
    compare_sglang.report(*releases)
    assert source.find("sglang.srt.server_args", "ServerArgs") is not None
    assert source.find("sglang.srt.pool", "Pool") is None
