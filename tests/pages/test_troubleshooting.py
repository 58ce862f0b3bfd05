"""The page on messages: each of ours has its entry, and each entry is a message of ours."""

import re
from pathlib import Path

import pytest

from tests.fixtures import messages as said

PAGE = (said.PACKAGE / "docs" / "troubleshooting.md").read_text()
MESSAGES = said.messages()


def entries(text: str) -> list[str]:
    """The code in the first column of its tables: heads of messages, `…` for what is filled in."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return [a or b for cell in cells for a, b in re.findall(r"``(.+?) ?``|`([^`]+)`", cell)]


def test_every_message_has_an_entry() -> None:
    known = set(entries(PAGE))
    missing = [f"{message.where}: {message.head}" for message in MESSAGES if message.head not in known]
    assert not missing, "write what brings it about and its cure into sglang_dflash/docs/troubleshooting.md"


def test_every_entry_is_a_message() -> None:
    heads = {message.head for message in MESSAGES}
    assert not [entry for entry in entries(PAGE) if entry not in heads]


SAYS = """
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
    (tmp_path / file).write_text(SAYS)
    assert [message.head for message in said.messages(tmp_path)] == heads
