"""docs/troubleshooting.md: every message that it quotes exists in the package."""

import re
from pathlib import Path

import pytest

from tests.fixtures.messages import PACKAGE, messages

PAGE = (PACKAGE / "docs" / "troubleshooting.md").read_text()


def entries(text: str) -> list[str]:
    """Return the bold code spans at the start of entries: heads of messages, with `…` for filled-in values."""
    titles = re.findall(r"^- \*\*((?:`[^`]+`[,\s]*)+)\*\*:", text, re.MULTILINE)
    return [re.sub(r"\s+", " ", code) for title in titles for code in re.findall(r"`([^`]+)`", title)]


def test_entries_are_read() -> None:
    assert entries("- **`a\n  b`, `c`**: why\n- **No message**: `d`\n- **`e` with words**: why") == ["a b", "c"]


def test_every_entry_is_a_message() -> None:
    quoted = entries(PAGE)
    heads = {message.head for message in messages()}
    assert quoted
    assert not [entry for entry in quoted if entry not in heads]


SOURCE = """
WAY_OUT = "or leave it"
def f(path, n):
    raise ValueError(f"{path}: {n} is odd; {WAY_OUT}")
def g(error):
    raise OSError(f"{error}") from error
def h():
    logger.warning("slow: %d of %.1f", 1, 2)
    print("one URL", file=sys.stderr)
    print("fine")
def why_not(name):
    return f"no {name} {WAY_OUT}"
"""


@pytest.mark.parametrize(
    ("file", "heads"),
    [
        ("a.py", ["…: … is odd", "slow: … of …", "one URL"]),
        ("backends.py", ["…: … is odd", "slow: … of …", "one URL", "no … or leave it"]),
    ],
)
def test_messages_are_found(tmp_path: Path, file: str, heads: list[str]) -> None:
    (tmp_path / file).write_text(SOURCE)
    assert [message.head for message in messages(tmp_path)] == heads
