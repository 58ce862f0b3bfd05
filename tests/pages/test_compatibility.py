"""docs/compatibility.md lists the refused flags with the reasons that messages give. Other pages link to the list."""

import re

import pytest

from sglang_dflash.engine.host.arguments import UNSUPPORTED, flag
from tests.fixtures.messages import PACKAGE, messages

DOCS = PACKAGE / "docs"
LIST = (DOCS / "compatibility.md").read_text().split("## What it does not do\n")[1]
ROWS = {row: why for row, why, _ in re.findall(r"^\| (`.+?) \| (.+?) \| (.+?) \|$", LIST, re.MULTILINE)}
FLAGS = {row: re.findall(r"`(--[a-z-]+|SGLANG_[A-Z_]+)`", row)[0] for row in ROWS}


def test_unsupported_flags_are_listed_with_their_reasons() -> None:
    listed = {row.strip("`"): why for row, why in ROWS.items() if re.fullmatch(r"`--[a-z-]+`", row)}
    assert listed == {flag(name): why for name, why in UNSUPPORTED.items()}


@pytest.mark.parametrize("row", [row for row in ROWS if not re.fullmatch(r"`--[a-z-]+`", row)])
def test_listed_combination_has_a_message(row: str) -> None:
    name = FLAGS[row].removesuffix("-single")
    assert any(name in message.head for message in messages())


@pytest.mark.parametrize(
    "page", [DOCS / "from-stock.md", DOCS / "troubleshooting.md", DOCS.parent.parent / "README.md"]
)
def test_other_pages_link_to_the_list(page) -> None:
    assert "compatibility.md#what-it-does-not-do" in page.read_text()
