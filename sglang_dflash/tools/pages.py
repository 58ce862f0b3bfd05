"""Commands `sglang-dflash docs` and `sglang-dflash dashboard`, which print files of the package."""

import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_dflash.cli import Parser, nearest_or_all

PACKAGE = Path(__file__).parents[1]
DASHBOARD = PACKAGE / "assets" / "dashboard.json"
DOCS = {path.stem: path for path in sorted((PACKAGE / "docs").glob("*.md"))}


def dashboard(argv: Sequence[str]) -> int:
    """Print the Grafana dashboard as JSON. Return the exit status."""
    parser = Parser(
        prog="sglang-dflash dashboard",
        description="Print the Grafana dashboard as JSON, for a file to import: sglang-dflash dashboard > dflash.json",
    )
    parser.parse_args(argv)
    print(DASHBOARD.read_text(), end="")
    return 0


def docs(argv: Sequence[str]) -> int:
    """Print the named pages; without names, list all pages with titles and paths. Return the exit status."""
    parser = Parser(
        prog="sglang-dflash docs", description="List the pages of the documentation with their files, or print pages."
    )
    text = f"page to print, with or without .md: {', '.join(DOCS)}"
    parser.add_argument("page", nargs="*", metavar="PAGE", help=text)
    pages = parser.parse_args(argv).page
    if not pages:
        for name, path in DOCS.items():
            print(f"{name:16} {path.read_text().splitlines()[0].lstrip('# '):60} {path}")
        return 0
    names = {name.lower(): name for name in DOCS}
    found = [names.get(page.lower().removesuffix(".md")) for page in pages]
    for page, known in zip(pages, found, strict=True):
        if known is None:
            cure = nearest_or_all(page.removesuffix(".md"), DOCS)
            print(f"docs: there is no page {page}{cure}", file=sys.stderr)
    if None in found:
        return 2
    print("\n".join(DOCS[name].read_text() for name in found if name), end="")
    return 0
