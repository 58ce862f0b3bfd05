"""What can be said of an installation without importing SGLang, and the form in which everything is said."""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points, version

from sglang_dflash import flags

ENTRY_POINTS = {
    "sglang.srt.plugins": ("sglang_dflash", "sglang_dflash.plugin:register"),
    "sglang.srt.platforms": ("sglang_dflash_cpu", "sglang_dflash.cpu:activate"),
}

# What a check may raise to say no: our own errors, and those of SGLang's argument resolution.
REFUSALS = (ValueError, RuntimeError, AssertionError, OSError, ImportError)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.name:14} {self.text}"


def find(checks: Mapping[str, Callable[[], str]]) -> list[Finding]:
    """What each says, in their order; one that raises one of `REFUSALS` has said no."""
    return [_find(name, check) for name, check in checks.items()]


def _find(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except REFUSALS as refusal:
        return Finding(name, False, str(refusal) or type(refusal).__name__)


def installation() -> list[Finding]:
    return find({"versions": versions, "environment": environment, "entry points": found_by_sglang})


def versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("sglang-dflash", "sglang", "torch"))
    return f"{packages}, python {platform.python_version()}"


def environment() -> str:
    read = flags.read(os.environ)
    return f"worker {read.worker}, overlap schedule {'allowed' if read.overlap else 'off'}"


def found_by_sglang() -> str:
    """The entry points that SGLang looks up, as this Python finds them.

    Raises:
        RuntimeError: one is missing, or another package's.
    """
    for group, (name, value) in ENTRY_POINTS.items():
        found = [point.value for point in entry_points(group=group) if point.name == name]
        if found != [value]:
            raise RuntimeError(f"entry point {name} in {group} is {found or 'missing'}, not {value}; install again")
    return " and ".join(name for name, _ in ENTRY_POINTS.values())
