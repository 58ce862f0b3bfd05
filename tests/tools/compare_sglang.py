"""Comparison of two releases of SGLang, for the day on which this package follows one.

    python -m tests.tools.compare_sglang 0.5.22 0.5.23

Prints what changed of every name in the host contract, and of the modules of SGLang's own DFLASH worker:

    gone        the new release lacks the name, or a member that this package needs
    signature   parameters of a function or method changed, or base classes of a class
    body        only the code changed, without comments and docstrings
    new         only the new release has the name

A release is a version, whose wheel is downloaded, or a folder that contains an unpacked `sglang`. Nothing is imported.
"""

import argparse
import ast
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from sglang_dflash.engine.host import source
from sglang_dflash.engine.host.names import SECTIONS, Name

WHEELS = Path(__file__).parents[2] / ".run" / "wheels"
# SGLang's own DFLASH worker and its model. Its other changes are of interest too.
BUILT_IN = tuple(
    f"sglang.srt.{module}"
    for module in (
        "speculative.dflash_worker_v2", "speculative.dflash_utils", "speculative.dflash_info",
        "speculative.domino_utils", "models.dflash",
    )
)  # fmt: skip
KINDS = ("gone", "signature", "body", "new")


class Facts(NamedTuple):
    """Facts about a definition: text of its signature, digest of its code, members of the contract that it lacks."""

    signature: str
    body: str
    lacks: frozenset[str] = frozenset()


class Change(NamedTuple):
    kind: str
    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<11} {self.name}{f': {self.detail}' if self.detail else ''}"


@contextmanager
def release(folder: Path) -> Iterator[None]:
    """Let `source` read the SGLang in `folder`."""
    for cached in (source.root, source.tree):
        cached.cache_clear()
    with mock.patch.object(source, "root", return_value=folder):
        yield
    source.tree.cache_clear()


def contract(folder: Path) -> dict[str, Facts]:
    """Return facts about each name of the contract that the release has, by the name."""
    found = dict[str, Facts]()
    with release(folder):
        for name in (name for names in SECTIONS.values() for name in names if name.module.startswith("sglang")):
            key = f"{name.module}.{name.qualname}"
            definition = definition_of(name)
            if definition is None:
                continue
            lacks = set(name.members.split()) - source.members(definition)
            known = found.get(key, read(definition.node))
            found[key] = known._replace(lacks=known.lacks | lacks)
            for member in name.members.split():
                if needed := source.method(definition, member):
                    found[f"{key}.{member}"] = read(needed.node)
    return found


def definition_of(name: Name) -> source.Source | None:
    """Return the definition of a name of the contract; None if the release lacks it."""
    first, *rest = name.qualname.split(".")
    if source.file(name.module) is None:
        return None
    found = source.find(name.module, first)
    for part in rest:
        found = source.method(found, part)
    if found is None and not rest and first in source.lazy(name.module):
        return source.Source(ast.Pass(), name.module)
    return found


def built_in(folder: Path) -> dict[str, Facts]:
    """Return facts about each function, class and method of the modules `BUILT_IN`."""
    found = dict[str, Facts]()
    with release(folder):
        for module in BUILT_IN:
            for node in source.tree(module).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found[f"{module}.{node.name}"] = read(node)
                if isinstance(node, ast.ClassDef):
                    methods = (one for one in node.body if isinstance(one, ast.FunctionDef))
                    found |= {f"{module}.{node.name}.{one.name}": read(one) for one in methods}
    return found


def read(node: ast.AST) -> Facts:
    """Return facts about a definition. Those about a class are its bases and its code outside of methods."""
    match node:
        case ast.FunctionDef():
            return Facts(f"({ast.unparse(without_types(node.args))})", digest(node.body))
        case ast.ClassDef():
            outside = [statement for statement in node.body if not isinstance(statement, ast.FunctionDef)]
            return Facts(", ".join(map(ast.unparse, node.bases)), digest(outside))
    return Facts("", digest([node]))


def without_types(arguments: ast.arguments) -> ast.arguments:
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return arguments


def digest(body: list[ast.stmt] | list[ast.AST]) -> str:
    """Return a digest of code without its docstring. Comments are not in a syntax tree."""
    has_docstring = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return sha256("\n".join(map(ast.unparse, body[bool(has_docstring) :])).encode()).hexdigest()


def changes(old: Mapping[str, Facts], new: Mapping[str, Facts]) -> list[Change]:
    """Return the changes between two releases, in the order of `KINDS` and of names."""
    found = [Change("gone", name) for name in old.keys() - new.keys()]
    found += [Change("new", name) for name in new.keys() - old.keys()]
    for name in old.keys() & new.keys():
        before, after = old[name], new[name]
        found += [Change("gone", f"{name}: {member}") for member in after.lacks - before.lacks]
        found += [Change("new", f"{name}: {member}") for member in before.lacks - after.lacks]
        if after.signature != before.signature:
            found.append(Change("signature", name, f"{before.signature} -> {after.signature}"))
        elif after.body != before.body:
            found.append(Change("body", name))
    return sorted(found, key=lambda change: (KINDS.index(change.kind), change.name))


def fetched(version: str) -> Path:
    """Return a folder with the release: `version` itself if it is a folder, else its unpacked wheel."""
    if Path(version).is_dir():
        return Path(version)
    folder = WHEELS / version
    if not (folder / "sglang").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder))
        subprocess.run([*download, f"sglang=={version}"], check=True)
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    return folder


def report(old: Path, new: Path) -> str:
    """Return the text that the command prints."""
    parts = []
    for title, facts in (("The host contract", contract), ("SGLang's own DFLASH", built_in)):
        before, after = facts(old), facts(new)
        found = changes(before, after)
        counts = Counter(change.kind for change in found)
        counted = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
        parts += [f"{title}: {len(before.keys() | after.keys())} names, {counted}", *map(str, found), ""]
    return "\n".join(parts).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="version or folder")
    parser.add_argument("new", help="version or folder")
    options = parser.parse_args()
    print(report(fetched(options.old), fetched(options.new)))


if __name__ == "__main__":
    main()
