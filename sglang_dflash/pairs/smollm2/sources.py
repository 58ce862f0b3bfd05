"""Prompts about real code and documentation, taken from installed Python packages."""

import ast
from collections.abc import Iterator, Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from random import Random
from textwrap import dedent
from typing import NamedTuple

Messages = list[dict[str, str]]

EDITS = (
    "Write a docstring for this function.",
    "Add type hints to this function.",
    "Rewrite this function so that it is easier to read.",
    "Rename the variables of this function to longer names.",
    "Add a check of the arguments to this function.",
    "Add comments to this function.",
    "Return the function unchanged, but rename it to `new_name`.",
)
ON_CODE = (*EDITS, "Explain what this function does.", "Write a test for this function.")
COMPLETIONS = (
    "Complete this function.",
    "Write the body of this function.",
    "Write a solution to the following problem.",
    "Implement the following function in Python, and explain it in one sentence.",
)
SUMMARIES = (
    "Summarize the following text in two sentences.",
    "Summarize the text below in a short paragraph.",
    "List the main points of this text.",
)
ON_TEXT = (
    *SUMMARIES,
    "Explain the following to a beginner.",
    "Rewrite this text in simple words.",
    "Correct the grammar of this text and repeat it.",
    "Continue this text.",
    "Ask three questions about this text and answer them.",
)
NOT_SOURCE = {"site-packages", "test", "tests"}


class Kind(StrEnum):
    """Kind of a piece: a function, a function's header (signature and docstring), or a docstring."""

    CODE = "code"
    HEADER = "header"
    TEXT = "text"


class Piece(NamedTuple):
    """Part of a source file."""

    kind: Kind
    text: str


def sources(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield the text and the syntax tree of each Python file in `folder`.

    Folders of tests and installed packages (`NOT_SOURCE`) are skipped, and files that do not parse, such as templates.
    """
    for path in sorted(folder.rglob("*.py")):
        if NOT_SOURCE & set(path.relative_to(folder).parts):
            continue
        try:
            text = path.read_text()
            yield text, ast.parse(text)
        except (SyntaxError, ValueError):  # no text, or on Python 3.11 a null byte
            continue


def pieces(text: str, tree: ast.Module) -> Iterator[Piece]:
    """Yield the pieces of one file: docstrings of 200 to 1,200 characters, functions, and their headers."""
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        doc = ast.get_docstring(node)
        if doc and 200 <= len(doc) <= 1200:
            yield Piece(Kind.TEXT, doc)
        if isinstance(node, ast.FunctionDef):
            yield from function_pieces(node, dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])))


def function_pieces(node: ast.FunctionDef, source: str) -> Iterator[Piece]:
    """Yield a function and its header; nothing unless the function has 4 to 30 lines and at most 1,200 characters.

    The header is the source up to the end of the docstring. A function without a docstring or a body has no header.
    """
    lines = source.splitlines()
    if not 4 <= len(lines) <= 30 or len(source) > 1200:
        return
    yield Piece(Kind.CODE, source)
    if ast.get_docstring(node) and len(node.body) > 1:
        yield Piece(Kind.HEADER, "\n".join(lines[: (node.body[0].end_lineno or 0) - node.lineno + 1]))


def tasks(folders: Sequence[Path], n: int, seed: int) -> Iterator[Messages]:
    """Yield at most `n` user messages with tasks on pieces from `folders`.

    Half of the tasks are about code, and a third of this half are completions. The other half is about text.
    """
    found = pieces_of(folders)
    n_completions = n // 6
    yield from of_kind(found, n // 2 - n_completions, seed, ON_CODE, Kind.CODE)
    yield from of_kind(found, n_completions, seed, COMPLETIONS, Kind.HEADER)
    yield from of_kind(found, n // 2, seed, ON_TEXT, Kind.TEXT)


def pieces_of(folders: Sequence[Path]) -> set[Piece]:
    """Return the distinct pieces of the Python files in `folders`, see `sources`."""
    return {piece for folder in folders for source in sources(folder) for piece in pieces(*source)}


def of_kind(found: set[Piece], n: int, seed: int, asked: Sequence[str], kind: Kind) -> Iterator[Messages]:
    """Yield at most `n` user messages: a random request of `asked`, then a piece of the given kind."""
    random = Random(f"{seed}/{kind}")
    texts = sorted(piece.text for piece in found if piece.kind == kind)
    for text in random.sample(texts, min(len(texts), n)):
        body = text if kind == Kind.TEXT else f"```python\n{text}\n```"
        yield [{"role": "user", "content": f"{random.choice(asked)}\n\n{body}"}]


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, or raise ValueError."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the package {package} is not installed; pip install {package.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0])
