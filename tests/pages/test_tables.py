"""`python -m tests.tools.tables.write`: the generated tables of the pages."""

import pytest

from tests.tools.tables.write import DOCS, replaced, tables

PAGE = "before\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n| c |\n|---|\n"


def test_every_page_has_its_tables() -> None:
    """The pages need no change. All tables are found by their first lines."""
    for name, table in tables():
        page = (DOCS / name).read_text()
        assert replaced(page, table) == page, "run `python -m tests.tools.tables.write`"


def test_a_table_is_replaced_by_its_first_line() -> None:
    assert replaced(PAGE, "| a | b |\n|---|---|\n| 3 | 4 |\n| 5 | 6 |\n") == PAGE.replace("1 | 2", "3 | 4 |\n| 5 | 6")
    with pytest.raises(ValueError, match=r"has 0 tables that begin with '\| d \|', not one; change its first line"):
        replaced(PAGE, "| d |\n|---|")
