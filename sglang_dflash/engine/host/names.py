"""Names of the host contract: every name in SGLang that this package hooks, overrides or calls.

The names are read from the file `sglang-0.5.23.txt`, which explains its format. `contract.py` compares the names with
the running SGLang, `source.py` with SGLang's source.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SGLANG = "0.5.23"


class Name(NamedTuple):
    """One name of SGLang.

    Attributes:
        module: module that defines or re-exports the name.
        qualname: `function`, `Class` or `Class.method`.
        members: blank-separated; a function's parameters, or a class's fields, methods and instance attributes.
        hook: key of the name in `HOOKS`; "": this package does not hook the name.
    """

    module: str
    qualname: str
    members: str = ""
    hook: str = ""


def read(text: str) -> dict[str, tuple[Name, ...]]:
    """Parse the text of the file, and return the names by section."""
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
    """Yield the lines that are neither comments nor empty. A line indented by 8 blanks continues the line before it."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" " * 8):
            lines[-1] += f" {line.strip()}"
        elif line and not line.startswith("#"):
            lines.append(line)
    return iter(lines)


SECTIONS = read(Path(__file__).with_name(f"sglang-{SGLANG}.txt").read_text())
# Hooked names in the form "module.Class.method", by this package's name of the hook.
HOOKS = {name.hook: f"{name.module}.{name.qualname}" for names in SECTIONS.values() for name in names if name.hook}
