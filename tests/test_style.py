"""Style limits: sizes of functions, nesting, arguments, handlers that catch all errors, `getattr`, `hasattr`.

A file is split where a second idea begins, not at a number of lines. From `LONG` lines on a warning says so.

If a limit is wrong for good code, change the limit here and give the reason. Code is parsed, not imported.
"""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("sglang_dflash", "kernels") for path in (ROOT / folder).rglob("*.py"))
LONG = 400  # lines; literal tables of the module do not count: a table is no easier to read if it is split
FUNCTION_LINES = 50
KERNEL_LINES = 120
DEPTH = 3  # nested blocks
POSITIONAL = 5  # number of `spec_generate`'s positional arguments, which model cards prescribe
PROBES = ("getattr", "hasattr")
PROBING_MODULE = "contract.py"  # the only module that may use `PROBES`
STAND_INS = ("cpu", "rehearsal")  # folders of replacements for SGLang's functions: SGLang decides their arguments

Function = ast.FunctionDef | ast.AsyncFunctionDef
Block = ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match
Display = ast.Dict | ast.List | ast.Set | ast.Tuple | ast.Constant


def depth(node: ast.AST) -> int:
    """Return how deep blocks are nested below `node`. Inner functions do not count, and an `elif` adds no level."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child) + (isinstance(child, Block) and not is_elif))
    return deepest


def function_complaints(function: Function, path: Path) -> Iterator[str]:
    is_kernel = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    # Lines of the body only, because a stand-in's signature may be long.
    n_lines, limit = function.end_lineno - function.body[0].lineno + 1, KERNEL_LINES if is_kernel else FUNCTION_LINES
    n_positional = sum(arg.arg not in ("self", "cls") for arg in function.args.posonlyargs + function.args.args)
    if n_lines > limit:
        yield f"{function.name} has {n_lines} lines > {limit}"
    if depth(function) > DEPTH:
        yield f"{function.name} nests {depth(function)} blocks > {DEPTH}"
    if n_positional > POSITIONAL and not is_kernel and path.parent.name not in STAND_INS:
        yield f"{function.name} takes {n_positional} positional arguments > {POSITIONAL}"


def node_complaints(node: ast.AST, path: Path) -> Iterator[str]:
    if isinstance(node, Function):
        yield from function_complaints(node, path)
    if isinstance(node, ast.ExceptHandler):
        caught = ast.unparse(node.type) if node.type else "BaseException"
        if {"Exception", "BaseException"} & set(caught.strip("()").replace(",", " ").split()):
            yield "catches everything"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in PROBES and path.name != PROBING_MODULE:
        yield f"{ast.unparse(node.func)} outside {PROBING_MODULE}"


def is_table(node: ast.stmt) -> bool:
    """Return whether a statement assigns a literal. Calls may occur in it, lambdas and comprehensions may not."""
    match node:
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            runs = (isinstance(inner, ast.Lambda | ast.comprehension) for inner in ast.walk(node))
            return isinstance(value, Display) and not any(runs)
    return False


def complaints(source: str, path: Path) -> list[str]:
    tree = ast.parse(source)
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.ExceptHandler | ast.Call))
    return [f"line {node.lineno}: {text}" for node in nodes for text in node_complaints(node, path)]


def advice(source: str) -> str:
    """Return a sentence about the size of a long file; "" for other files."""
    tables = (node for node in ast.parse(source).body if is_table(node))
    n_lines = source.count("\n") - sum(node.end_lineno - node.lineno + 1 for node in tables)
    return (
        f"{n_lines} lines: if a second idea begins in it, move that idea to a file of its own"
        if n_lines >= LONG
        else ""
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_style(path: Path) -> None:
    source = path.read_text()
    if sentence := advice(source):
        warnings.warn(f"{path.relative_to(ROOT)} has {sentence}", stacklevel=1)
    assert complaints(source, path) == []


NESTED = "def f():\n for a in b:\n  if c:\n   with d:\n    if e:\n     pass"
CHAIN = "def f():\n if a:\n  pass\n elif b:\n  pass\n elif c:\n  pass\n elif d:\n  pass"


@pytest.mark.parametrize(
    ("source", "is_long"),
    [
        ("\n" * 399, False),
        ("\n" * 400, True),
        ("a: dict[int, str] = {\n" + "    1: f(2),\n" * 400 + "}", False),
        ("a = [\n" + "    1,\n" * 400 + "]\n" + "\n" * 400, True),
        ("a = f(\n" + "    1,\n" * 400 + ")", True),
        ("a = [\n" + "    lambda: 1,\n" * 400 + "]", True),
        ("class A:\n  a = [\n" + "    1,\n" * 400 + "  ]", True),
    ],
)
def test_a_long_file_gets_advice_and_no_complaint(source: str, is_long: bool) -> None:
    assert advice(source).endswith("move that idea to a file of its own") is is_long
    assert complaints(source, Path("some.py")) == []


@pytest.mark.parametrize(
    ("source", "n_complaints"),
    [
        ("def f():\n" + " pass\n" * 51, 1),
        ("@triton.jit\ndef f():\n" + " pass\n" * 51, 0),
        ("@triton.jit\ndef f():\n" + " pass\n" * 121, 1),
        (NESTED, 1),
        (CHAIN, 0),
        ("def f(a, b, c, d, e, f): pass", 1),
        ("def f(self, a, b, c, d, e, *, f): pass", 0),
        ("try: f()\nexcept: pass", 1),
        ("try: f()\nexcept (OSError, Exception): pass", 1),
        ("try: f()\nexcept OSError: pass", 0),
        ("getattr(a, 'b')", 1),
    ],
)
def test_complaints_are_found(source: str, n_complaints: int) -> None:
    assert len(complaints(source, Path("some.py"))) == n_complaints
