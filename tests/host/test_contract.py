"""The host contract against SGLang's source as installed: parsed, never imported, so this needs neither GPU nor time.

`Source` finds a name the way Python would (assignments, re-exports, star imports, base classes), and knows of a class
its fields, methods, instance attributes and what its `__init__` takes.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_dflash.bench.chat import HTTP_NAMES
from sglang_dflash.host import contract
from sglang_dflash.host.names import SECTIONS, SGLANG, Name

PACKAGE = Path(contract.__file__).parents[1]


@cache
def root() -> Path:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))).parent


@dataclass(frozen=True)
class Source:
    """A definition and the module it was found in."""

    node: ast.AST
    module: str


@cache
def tree(module: str) -> ast.Module:
    path = root() / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def statements(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under `if` and `try` included; not what only a type checker sees."""
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        for body in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                yield from statements(getattr(node, body, []))


def find(module: str, name: str) -> Source | None:
    """Where `name` of `module` is defined."""
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
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(origin)
                    elif (alias.asname or alias.name) == name and origin.startswith("sglang"):
                        return find(origin, alias.name)
    return next((found for star in stars if (found := find(star, name))), None)


def absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".")
    is_package = (root() / module.replace(".", "/")).is_dir()
    base = package[: len(package) - node.level + is_package]
    return ".".join([*base, *filter(None, [node.module])])


def instance(module: str, value: ast.expr) -> Source | None:
    """`name = Class()` is known by its class."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return find(module, value.func.id)
    return None


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


def problem(name: Name) -> str:
    """What is wrong with one line of the table; empty if nothing."""
    first, *rest = name.qualname.split(".")
    source = find(name.module, first)
    for part in rest:
        assert source is not None, name
        assert isinstance(source.node, ast.ClassDef), name
        method = next((n for n in source.node.body if isinstance(n, ast.FunctionDef) and n.name == part), None)
        source = method and Source(method, source.module)
    if source is None:
        return "" if first in lazy(name.module) else f"{name.module} has no {name.qualname}"
    unknown = set(name.members.split()) - members(source)
    return f"{name.qualname} has no {', '.join(sorted(unknown))}" if unknown else ""


def lazy(module: str) -> set[str]:
    """Names a module's `__getattr__` answers, as far as it compares them with a literal."""
    function = next((n for n in tree(module).body if isinstance(n, ast.FunctionDef) and n.name == "__getattr__"), None)
    return {n.value for n in ast.walk(function) if isinstance(n, ast.Constant)} if function else set()


# FlashInfer is not SGLang: checked where it is used.
TABLES = [name for section, names in SECTIONS.items() if section != "flashinfer" for name in names]


@pytest.mark.parametrize("name", [*TABLES, *HTTP_NAMES], ids=lambda name: name.qualname)
def test_the_installed_sglang_has_it(name: Name) -> None:
    assert problem(name) == ""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            Name(
                "sglang.srt.speculative.base_spec_worker", "BaseSpecWorker.alloc_memory_pool", "req_to_token_pool pages"
            ),
            "BaseSpecWorker.alloc_memory_pool has no pages",
        ),
        (
            Name("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm.make_worker", "server_args"),
            "sglang.srt.speculative.spec_info has no SpeculativeAlgorithm.make_worker",
        ),
        (Name("sglang.srt.configs.model_config", "ModelConfig", "hf_configs"), "ModelConfig has no hf_configs"),
        (Name("sglang.srt.utils", "async_h2h"), "sglang.srt.utils has no async_h2h"),
    ],
    ids=["parameter", "method", "attribute", "function"],
)
def test_a_renamed_one_is_noticed(name: Name, sentence: str) -> None:
    assert problem(name) == sentence


def imports() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of every import of SGLang in the package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "sglang":
                    yield from ((str(file.relative_to(PACKAGE)), module, alias.name) for alias in node.names)
                case ast.Import():
                    for alias in node.names:
                        if alias.name.split(".")[0] == "sglang":
                            yield str(file.relative_to(PACKAGE)), alias.name, ""


def test_what_the_package_imports_is_in_the_table() -> None:
    listed = {(name.module, name.qualname.split(".")[0]) for name in TABLES}
    unlisted = [line for line in imports() if line[1:] not in listed]
    assert not unlisted, f"add a line for each to host/sglang-{SGLANG}.txt"


def test_nothing_is_listed_twice() -> None:
    lines = [(name.module, name.qualname) for name in TABLES]
    assert sorted(set(lines)) == sorted(lines)


def test_the_pin_is_the_version_the_contract_names() -> None:
    pyproject = (PACKAGE.parent / "pyproject.toml").read_text()
    assert f'"sglang=={SGLANG};' in pyproject
