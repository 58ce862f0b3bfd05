"""Rows of tests/mutations/*.toml: every edit fits the present code, and every named test exists.

`python -m tests.tools.mutate` runs the rows.
"""

import ast

from tests.tools.mutate import ROOT, read


def test_every_edit_matches_once() -> None:
    texts = {row.file: (ROOT / row.file).read_text() for row in read()}
    assert [str(row) for row in read() if texts[row.file].count(row.old) != 1 or row.old == row.new] == []


def test_every_mistake_is_python() -> None:
    """An edit with a syntax error would make any test fail, so its row would prove nothing."""
    for row in read():
        if row.file.endswith(".py"):
            ast.parse((ROOT / row.file).read_text().replace(row.old, row.new), row.what)


def test_every_mistake_has_a_test() -> None:
    missing = []
    for node in sorted({node for row in read() for node in row.test.split()}):
        file, *names = node.split("[")[0].split("::")
        defined = ast.walk(ast.parse((ROOT / file).read_text())) if (ROOT / file).is_file() else ()
        known = {inner.name for inner in defined if isinstance(inner, ast.FunctionDef | ast.ClassDef)}
        if not known or not known.issuperset(names):
            missing.append(node)
    assert missing == []
