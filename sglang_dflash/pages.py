"""Commands that print the documents of the package: the documentation and a Grafana dashboard."""

import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).parent
DASHBOARD = PACKAGE / "assets" / "dashboard.json"
DOCS = {path.stem: path for path in sorted((PACKAGE / "docs").glob("*.md"))}


def dashboard(argv: Sequence[str]) -> int:
    """Print the Grafana dashboard as JSON. Return the exit status."""
    if argv:
        print(
            "dashboard takes nothing; write what it prints into a file: sglang-dflash dashboard > dflash.json",
            file=sys.stderr,
        )
        return 2
    print(DASHBOARD.read_text(), end="")
    return 0


def docs(argv: Sequence[str]) -> int:
    """Print the named pages; without names, list all pages with titles and paths. Return the exit status."""
    if not argv:
        for name, path in DOCS.items():
            print(f"{name:16} {path.read_text().splitlines()[0].lstrip('# '):60} {path}")
        return 0
    unknown = [name for name in argv if name not in DOCS]
    if unknown:
        print(f"docs: there is no page {', '.join(unknown)}; there are {', '.join(DOCS)}", file=sys.stderr)
        return 2
    print("\n".join(DOCS[name].read_text() for name in argv), end="")
    return 0
