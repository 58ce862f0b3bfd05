"""The host contract's data: every SGLang name this package hooks, overrides or calls, read from a text file.

`sglang-0.5.23.txt` says what it holds and how to add a line; `contract.py` compares it with the SGLang that is running,
`source.py` with SGLang's source.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SGLANG = "0.5.23"


class Name(NamedTuple):
    """One name of the host.

    Attributes:
        module: where it is defined or re-exported.
        qualname: `function`, `Class` or `Class.method`.
        members: blank-separated; a function's parameters, or a class's fields, methods and instance attributes.
        hook: what `plugin.py` calls the hook it puts there; empty: none.
    """

    module: str
    qualname: str
    members: str = ""
    hook: str = ""


def read(text: str) -> dict[str, tuple[Name, ...]]:
    """Return names by section."""
    sections: dict[str, list[Name]] = {}
    module = section = ""
    for line in unwrapped(text):
        if line.startswith("["):
            section = line[1 : line.index("]")]
        elif not line.startswith(" "):
            module = line
        else:
            what, _, members = line.strip().partition(": ")
            qualname, _, hook = what.partition(" @")
            sections.setdefault(section, []).append(Name(module, qualname, members, hook))
    return {section: tuple(names) for section, names in sections.items()}


def unwrapped(text: str) -> Iterator[str]:
    """Return lines with their continuations, which are indented twice as far, without comments and empty lines."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" " * 8):
            lines[-1] += f" {line.strip()}"
        elif line and not line.startswith("#"):
            lines.append(line)
    return iter(lines)


SECTIONS = read(Path(__file__).with_name(f"sglang-{SGLANG}.txt").read_text())
# Where hooks are put, by the hook's name: "module.Class.method".
HOOKS = {name.hook: f"{name.module}.{name.qualname}" for names in SECTIONS.values() for name in names if name.hook}
