"""Layers: a file may import only its own room and rooms on lower floors of `FLOORS`.

A room is a folder of `sglang_dflash/`, a file at its top, or all of `kernels/`. Code is parsed, not imported. Imports
inside functions and for type checkers count too. A folder of tests/unit has the name of the room that it tests.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Rooms by floor, from the top floor down.
FLOORS = (
    {"plugin", "__main__"},
    {"prove", "demo"},
    {"check", "recipe", "pages", "worker", "hooks", "rehearsal", "bench", "train"},
    {"config", "cpu", "metrics", "tiny"},
    {"stages", "host", "capacity", "model", "mlx", "models", "servers"},
    {"width", "draft", "memory"},
    {"step", "flags", "errors", "cli", "sglang_dflash_kernels", "sglang_dflash"},
)
HEIGHT = {room: len(FLOORS) - n for n, rooms in enumerate(FLOORS) for room in rooms}


@cache
def files() -> dict[str, Path]:
    """Return the path of each module by its dotted name, without `sitecustomize` modules."""
    found = {}
    for folder, package in (("sglang_dflash", "sglang_dflash"), ("kernels", "sglang_dflash_kernels")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            if parts[-1] != "sitecustomize":
                found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def arrows() -> dict[str, set[str]]:
    """Return, for each module of this project, the project's modules that it imports."""
    known = files()
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = set()
        for name in imported(path.read_text()):
            while name and name not in known:
                name = name.rpartition(".")[0]
            found[module] |= {name} - {module, ""}
    return found


def room(module: str) -> str:
    first, *rest = module.split(".")
    return rest[0] if first == "sglang_dflash" and rest else first


def complaint(module: str, other: str) -> str:
    here, there = room(module), room(other)
    if here == there or HEIGHT[there] < HEIGHT[here]:
        return ""
    return f"{module} imports {other}: {there} is not below {here}"


def test_every_room_has_a_floor() -> None:
    assert {room(module) for module in files()} == set(HEIGHT)
    assert len(FLOORS) <= 7


@pytest.mark.parametrize("module", sorted(files()))
def test_imports_go_down(module: str) -> None:
    assert [text for other in sorted(arrows()[module]) if (text := complaint(module, other))] == []


def test_imports_have_no_cycle() -> None:
    TopologicalSorter(arrows()).prepare()


def misplaced(paths: Iterable[str], rooms: set[str]) -> list[str]:
    """Return misplaced files of `tests`.

    In tests/unit only tests are allowed, at its top or in a folder with a room's name. At the top of tests/server only
    tests are allowed too.
    """

    def is_misplaced(folder: str, *rest: str) -> bool:
        *folders, name = rest
        is_test = name.startswith("test_") or name == "conftest.py"
        in_a_room = len(folders) < 2 and set(folders) <= rooms
        return (folder == "unit" and not (in_a_room and is_test)) or (folder == "server" and not (folders or is_test))

    return [path for path in paths if path.count("/") and is_misplaced(*path.split("/"))]


def test_tests_are_in_the_folder_of_their_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "sglang_dflash").glob("*/__init__.py")}
    tests = ROOT / "tests"
    assert misplaced((str(path.relative_to(tests)) for path in tests.rglob("*.py")), rooms) == []


def test_misplaced_files_and_bad_imports_are_found() -> None:
    in_place = ["conftest.py", "unit/test_a.py", "unit/draft/test_b.py", "server/test_c.py", "server/lib/d.py"]
    assert misplaced(in_place, {"draft"}) == []
    out_of_place = ["unit/lib/test_a.py", "unit/a.py", "unit/draft/b.py", "unit/draft/draft/test_b.py", "server/d.py"]
    assert misplaced(out_of_place, {"draft"}) == out_of_place
    assert complaint("sglang_dflash.engine.memory.slots", "sglang_dflash.engine.stages.state") != ""
    assert complaint("sglang_dflash.engine.stages.state", "sglang_dflash.engine.memory.slots") == ""
    assert list(imported("def f():\n    from a.b import c\nimport d.e")) == ["d.e", "a.b.c"]
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
