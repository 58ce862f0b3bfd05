"""Prompts about real code and documentation, taken from installed Python packages."""

import ast
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random

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


def sources(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield the text and the syntax tree of each Python file in `folder`.

    Tests, installed packages (`NOT_SOURCE`) and files that do not parse, such as templates, are skipped.
    """
    for path in sorted(folder.rglob("*.py")):
        if NOT_SOURCE & set(path.relative_to(folder).parts):
            continue
        try:
            text = path.read_text()
            yield text, ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue


def pieces(text: str, tree: ast.Module) -> Iterator[tuple[bool, str]]:
    """Yield (is code, text) for each usable piece of a file.

    Pieces are functions of 4 to 30 lines and at most 1,200 characters, and docstrings of 200 to 1,200 characters.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        doc = ast.get_docstring(node)
        if doc and 200 <= len(doc) <= 1200:
            yield False, doc
        if isinstance(node, ast.FunctionDef) and 4 <= (node.end_lineno or 0) - node.lineno + 1 <= 30:
            source = ast.get_source_segment(text, node)
            if source and len(source) <= 1200:
                yield True, source


def tasks(folders: Sequence[Path], n: int, seed: int) -> Iterator[Messages]:
    """Yield at most `n` user messages with tasks on pieces from `folders`, half about code and half about text."""
    found = pieces_of(folders)
    yield from of_kind(found, n // 2, seed, ON_CODE, code=True)
    yield from of_kind(found, n // 2, seed, ON_TEXT, code=False)


def pieces_of(folders: Sequence[Path]) -> set[tuple[bool, str]]:
    """Parse all files in `folders`, and return their distinct pieces as (is code, text)."""
    return {piece for folder in folders for source in sources(folder) for piece in pieces(*source)}


def of_kind(found: set[tuple[bool, str]], n: int, seed: int, asked: Sequence[str], *, code: bool) -> Iterator[Messages]:
    """Yield at most `n` user messages: a random one of `asked`, then a function (`code`) or a docstring."""
    random = Random(f"{seed}/{code}")
    texts = sorted(text for is_code, text in found if is_code == code)
    for text in random.sample(texts, min(len(texts), n)):
        body = f"```python\n{text}\n```" if code else text
        yield [{"role": "user", "content": f"{random.choice(asked)}\n\n{body}"}]


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, or raise ValueError."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the package {package} is not installed; pip install {package.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0])
