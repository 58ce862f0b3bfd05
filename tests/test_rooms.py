"""Wings and rooms: who may import whom.

A wing is a folder of `sglang_dflash/`, a file at its top, or all of `kernels/`. A wing imports only wings that `BELOW`
lists. A room is a folder or file of a wing, and imports only rooms of the wing on lower floors of `FLOORS`. Code is
parsed, not imported. Imports inside functions and for type checkers count too. The folders of tests/unit mirror wings
and rooms.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND = {"sglang_dflash", "flags", "errors", "cli", "plot", "sglang_dflash_kernels"}  # import nothing but one another
# Wing -> wings, or rooms of wings, that it may import, besides the ground.
BELOW: dict[str, tuple[str, ...]] = {
    "plugin": ("engine", "platforms", "tools"),
    "__main__": (),
    "tools": ("engine", "platforms", "reference", "pairs"),
    "train": ("engine.draft", "engine.host", "reference", "pairs"),
    "platforms": ("engine",),
    "reference": ("engine.draft",),
    "pairs": ("engine", "reference"),
    "engine": (),
}
# Wing -> rooms by floor, from the top floor down.
FLOORS: dict[str, tuple[set[str], ...]] = {
    "tools": ({"prove", "demo"}, {"check", "recipe", "pages", "bench", "models", "mlx"}, {"capacity"}),
    "platforms": ({"rehearsal"}, {"cpu"}),
    "reference": ({"torch", "mlx"},),
    "pairs": ({"tiny", "smollm2"}, {"servers"}),
    "engine": (
        {"worker", "hooks"},
        {"config", "metrics"},
        {"stages", "host"},
        {"width", "draft", "memory"},
        {"step", "saver"},
    ),
}


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


def place(module: str) -> tuple[str, str]:
    """Return the wing and the room of a module; room "": the wing is a file, or the module is the wing's `__init__`."""
    package, *rest = module.split(".")
    wing, room = ([*rest, "", ""] if package == "sglang_dflash" and rest else [package, ""])[:2]
    return wing, room if wing in FLOORS else ""


def complaint(module: str, other: str) -> str:
    """Return a sentence if `module` may not import `other`; else ""."""
    (wing, room), (wing_below, room_below) = place(module), place(other)
    if wing == wing_below:
        floors = {name: n for n, names in enumerate(FLOORS.get(wing, ())) for name in names}
        if room == room_below or floors.get(room, -1) < floors.get(room_below, -1):
            return ""
        return f"{module} imports {other}: {room_below} is not below {room}"
    if wing_below in GROUND or {wing_below, f"{wing_below}.{room_below}"} & set(BELOW.get(wing, ())):
        return ""
    return f"{module} imports {other}: {wing} may not import {wing_below}"


def test_every_wing_and_room_has_a_place() -> None:
    places = {place(module) for module in files()}
    assert {wing for wing, _ in places} == set(BELOW) | GROUND
    for wing, floors in FLOORS.items():
        assert {room for there, room in places if there == wing and room} == set().union(*floors)


@pytest.mark.parametrize("module", sorted(files()))
def test_imports_go_down(module: str) -> None:
    assert [text for other in sorted(arrows()[module]) if (text := complaint(module, other))] == []


def test_imports_have_no_cycle() -> None:
    TopologicalSorter(arrows()).prepare()


def misplaced(paths: Iterable[str], rooms: set[str]) -> list[str]:
    """Return misplaced files of `tests`.

    In tests/unit only tests are allowed, at its top or in a folder of a wing or room. At the top of tests/server only
    tests are allowed too.
    """

    def is_misplaced(folder: str, *rest: str) -> bool:
        *folders, name = rest
        is_test = name.startswith("test_") or name == "conftest.py"
        in_a_room = not folders or "/".join(folders) in rooms
        return (folder == "unit" and not (in_a_room and is_test)) or (folder == "server" and not (folders or is_test))

    return [path for path in paths if path.count("/") and is_misplaced(*path.split("/"))]


def test_tests_are_in_the_folder_of_their_room() -> None:
    package, tests = ROOT / "sglang_dflash", ROOT / "tests"
    rooms = {str(path.parent.relative_to(package)) for path in package.rglob("__init__.py")}
    assert misplaced((str(path.relative_to(tests)) for path in tests.rglob("*.py")), rooms) == []


def test_misplaced_files_and_bad_imports_are_found() -> None:
    in_place = ["conftest.py", "unit/test_a.py", "unit/engine/draft/test_b.py", "server/test_c.py", "server/lib/d.py"]
    assert misplaced(in_place, {"engine", "engine/draft"}) == []
    out_of_place = ["unit/lib/test_a.py", "unit/a.py", "unit/engine/draft/b.py", "unit/draft/test_b.py", "server/d.py"]
    assert misplaced(out_of_place, {"engine", "engine/draft"}) == out_of_place
    bad = [
        ("engine.memory.slots", "engine.stages.state"),
        ("engine.draft.files", "tools.pages"),
        ("reference.torch.draft", "engine.host.names"),
        ("flags", "engine.step"),
        ("platforms.cpu.gdn", "pairs.tiny.pairs"),
    ]
    good = [("engine.stages.state", "engine.memory.slots"), ("tools.pages", "flags"), ("train.draft", "engine.draft.x")]
    assert [pair for pair in (*bad, *good) if complaint(*(f"sglang_dflash.{name}" for name in pair))] == bad
    assert list(imported("def f():\n    from a.b import c\nimport d.e")) == ["d.e", "a.b.c"]
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
