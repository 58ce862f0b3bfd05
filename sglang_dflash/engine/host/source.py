"""Check of the host contract by parsing SGLang's installed source, without importing it: two seconds, no GPU.

Names are followed through re-exports and star imports. A variable that is assigned a call `Class()` stands for the
class. Members of a class are its fields, methods, nested classes, instance attributes and the parameters of `__init__`,
and those of its base classes.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from sglang_dflash.engine.host.names import Name


class Source(NamedTuple):
    """A definition and the module that contains it."""

    node: ast.AST
    module: str


def problem(name: Name) -> str:
    """Return a sentence if SGLang's source lacks `name` or one of its members; else ""."""
    if file(name.module) is None:
        return f"there is no module {name.module}"
    first, *rest = name.qualname.split(".")
    source = find(name.module, first)
    if source is None and not rest and first in lazy(name.module):
        return ""
    for part in rest:
        source = method(source, part)
    if source is None:
        return f"{name.module} has no {name.qualname}"
    unknown = set(name.members.split()) - members(source)
    return f"{name.qualname} has no {', '.join(sorted(unknown))}" if unknown else ""


@cache
def root() -> Path:
    """Return the folder that contains SGLang's package.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed")
    return Path(next(iter(spec.submodule_search_locations))).parent


def version() -> str:
    """Return SGLang's version, from its source if possible. Metadata may belong to another SGLang that is installed."""
    path = root() / "sglang" / "_version.py"
    found = re.search(r"^__version__ = .*'(.+)'", path.read_text(), re.MULTILINE) if path.is_file() else None
    return found[1] if found else metadata.version("sglang")


def file(module: str) -> Path | None:
    """Return a module's file; None if there is none."""
    path = root() / module.replace(".", "/")
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@cache
def tree(module: str) -> ast.Module:
    """Return a module's syntax tree; empty if there is no such module."""
    found = file(module)
    return ast.parse(found.read_text() if found else "")  # no file: a star import from another package


def statements(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, including those under `if` and `try`, without `TYPE_CHECKING` blocks."""
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        match node:
            case ast.If():
                yield from statements(node.body + node.orelse)
            case ast.Try():
                handlers = [statement for handler in node.handlers for statement in handler.body]
                yield from statements(node.body + handlers + node.orelse + node.finalbody)


def find(module: str, name: str) -> Source | None:
    """Return the definition of `name` in `module`, or in the module from which `module` imports it; else None."""
    stars = []
    for node in statements(tree(module).body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                return Source(node, module)
            case ast.Assign() if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return instance(module, node.value) or Source(node, module)
            case ast.AnnAssign(target=ast.Name(id=target)) if target == name:
                return Source(node, module)
            case ast.ImportFrom():
                origin = absolute(module, node)
                named = {alias.asname or alias.name: alias.name for alias in node.names}
                if name in named and origin.startswith("sglang"):
                    return find(origin, named[name])
                if "*" in named:
                    stars.append(origin)
    return next((found for star in stars if (found := find(star, name))), None)


def absolute(module: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that `node`, a statement in `module`, imports from."""
    if not node.level:
        return node.module or ""
    package = module.split(".")
    found = file(module)
    is_package = found is not None and found.name == "__init__.py"
    base = package[: len(package) - node.level + is_package]
    return ".".join([*base, *filter(None, [node.module])])


def instance(module: str, value: ast.expr) -> Source | None:
    """Return the class if `value`, the right side of an assignment, is a call `Class()`; else None."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return find(module, value.func.id)
    return None


def method(source: Source | None, name: str) -> Source | None:
    """Return the method `name` if `source` is a class that itself defines it; else None."""
    if source is None or not isinstance(source.node, ast.ClassDef):
        return None
    own = (node for node in source.node.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return next((Source(node, source.module) for node in own), None)


def members(source: Source) -> set[str]:
    match source.node:
        case ast.FunctionDef():
            return parameters(source.node)
        case ast.ClassDef():
            return class_members(source.node, source.module)
    return set()


def parameters(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    return {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}


def class_members(class_: ast.ClassDef, module: str) -> set[str]:
    """Return the members of a class (see the module docstring)."""
    found: set[str] = set()
    for base in class_.bases:
        if isinstance(base, ast.Name) and (source := find(module, base.id)):
            found |= members(source)
    for node in class_.body:
        match node:
            case ast.FunctionDef():
                found.add(node.name)
                found |= {
                    n.attr
                    for n in ast.walk(node)
                    if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"
                }
                if node.name == "__init__":
                    found |= parameters(node)
            case ast.AnnAssign(target=ast.Name(id=target)):
                found.add(target)
            case ast.ClassDef():
                found.add(node.name)
            case ast.Assign():
                found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return found


def lazy(module: str) -> set[str]:
    """Return the names that a module's `__getattr__` may define: all string literals in that function."""
    function = next((n for n in tree(module).body if isinstance(n, ast.FunctionDef) and n.name == "__getattr__"), None)
    constants = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)] if function else []
    return {value for value in constants if isinstance(value, str)}
