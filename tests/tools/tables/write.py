"""Write every generated table into its page: `python -m tests.tools.tables.write`.

A table replaces the table of the page that has the same first line. If the first line itself changes, change it in the
page by hand first.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import sglang_dflash
from sglang_dflash import flags
from sglang_dflash.engine.metrics import table as metrics
from tests.tools.tables import capacity, recipe_table, step_cost

DOCS = Path(sglang_dflash.__file__).parent / "docs"


def tables() -> Iterator[tuple[str, str]]:
    """Yield the file name of each page with a generated table, and the table."""
    yield "environment.md", flags.table()
    yield "metrics.md", metrics.table()
    yield "recipes.md", "\n".join(recipe_table.rows())
    yield "recipes.md", "\n".join(recipe_table.card_rows())
    yield "memory.md", "\n".join(capacity.rows())
    yield "h200.md", "\n".join(step_cost.table())


def replaced(page: str, table: str) -> str:
    """Return the text of a page with a new table.

    Raises:
        ValueError: not exactly one table of the page has the same first line.
    """
    head = table.splitlines()[0]
    parts = re.split(rf"^{re.escape(head)}\n(?:\|.*\n)*", page, flags=re.MULTILINE)
    if len(parts) != 2:
        raise ValueError(
            f"the page has {len(parts) - 1} tables that begin with {head!r}, not one; change its first line"
        )
    return f"{parts[0]}{table.rstrip()}\n{parts[1]}"


if __name__ == "__main__":
    for name, table in tables():
        before = (DOCS / name).read_text()
        after = replaced(before, table)
        (DOCS / name).write_text(after)
        print(f"{name}: {'unchanged' if after == before else 'written'}")
