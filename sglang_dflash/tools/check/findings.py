"""Findings about an installation without importing SGLang, and the type of all findings."""

import gc
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points, version

from sglang_dflash import flags
from sglang_dflash.engine.host import source
from sglang_dflash.engine.host.names import SECTIONS, SGLANG
from sglang_dflash.engine.width.chooser import WIDEST
from sglang_dflash.flags import Worker

ENTRY_POINTS = {
    "sglang.srt.plugins": ("sglang_dflash", "sglang_dflash.plugin:register"),
    "sglang.srt.platforms": ("sglang_dflash_cpu", "sglang_dflash.platforms.cpu:activate"),
}

# Errors by which a check fails: those of this plugin, and those of SGLang's argument resolution.
REFUSALS = (ValueError, RuntimeError, AssertionError, OSError, ImportError, AttributeError)


Check = Callable[[], str | tuple[str, str]]  # returns a text, or a text and its detail


@dataclass(frozen=True)
class Finding:
    """Result of one check: a line of the report, and a detail for the JSON document."""

    name: str
    ok: bool
    text: str
    detail: str = ""  # in the JSON document only

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.name:14} {self.text}"


def find(checks: Mapping[str, Check]) -> list[Finding]:
    """Run all checks in order. A check fails by raising one of `REFUSALS`."""
    return [_find(name, check) for name, check in checks.items()]


def _find(name: str, check: Check) -> Finding:
    try:
        found = check()
        return Finding(name, True, *([found] if isinstance(found, str) else found))
    except REFUSALS as refusal:
        return Finding(name, False, sentence(refusal))


def sentence(refusal: Exception) -> str:
    """Return the error's message, or its class name if the message is empty.

    For an AttributeError or a JSON error from SGLang, return a sentence with the message and a cure.
    """
    if isinstance(refusal, AttributeError):
        return (
            f"this model cannot be read with these flags ({refusal}); drop flags that do not fit the model, such as "
            "--json-model-override-args or --draft-steps"
        )
    if isinstance(refusal, json.JSONDecodeError):
        return f"{refusal.doc[:80]!r} is not JSON ({refusal}); fix the flag or the file with this text"
    return str(refusal) or type(refusal).__name__


def installation(*, launch: bool = False) -> list[Finding]:
    """Return the findings that need no import of SGLang; `launch`: launch flags are given, see `environment`."""
    return find(
        {
            "versions": versions,
            "environment": partial(environment, launch=launch),
            "entry points": found_by_sglang,
            "host contract": contract,
        }
    )


def versions() -> str:
    """Return the versions of the packages and of Python."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("sglang-dflash", "sglang", "torch"))
    return f"{packages}, python {platform.python_version()}"


def environment(*, launch: bool = False) -> str:
    """Check the environment variables, and return a sentence with the selected worker and schedule.

    Args:
        launch: launch flags are given. Then this function does not check the widths: `DFlashConfig` checks them.
    Raises:
        ValueError: a variable has an invalid value, or stops SGLang from loading this plugin or its platform.
    """
    read = flags.read(os.environ)
    beyond = [width for width in read.widths if not 1 <= width <= WIDEST]
    if beyond and not launch:
        also = ", or add the launch flags if the block is longer" if beyond[0] > WIDEST else ""
        cure = "remove this number from the variable" if len(read.widths) > 1 else "unset the variable"
        raise ValueError(f"SGLANG_DFLASH_WIDTHS: {beyond[0]} is not within 1..{WIDEST}; {cure}{also}")
    if read.worker is Worker.PLUGIN:
        flags.require_trace_folder(read)
        _require_loaded()
    return f"worker {read.worker}, overlap schedule {'allowed' if read.overlap else 'off'}"


def _require_loaded() -> None:
    """Check that the environment lets SGLang load this plugin. `SGLANG_PLUGINS` is a list, `SGLANG_PLATFORM` a name."""
    (plugin, _), (platform_name, _) = ENTRY_POINTS.values()
    plugins, chosen = os.environ.get("SGLANG_PLUGINS", ""), os.environ.get("SGLANG_PLATFORM", "")
    if plugins and plugin not in map(str.strip, plugins.split(",")):
        raise ValueError(
            f"SGLANG_PLUGINS={plugins} stops SGLang from loading sglang-dflash; add {plugin} to it (without a GPU also "
            f"{platform_name}), or set SGLANG_DFLASH_WORKER=stock"
        )
    if chosen and chosen != platform_name:
        raise ValueError(
            f"SGLANG_PLATFORM={chosen} stops SGLang from loading sglang-dflash; unset it, or set "
            "SGLANG_DFLASH_WORKER=stock"
        )


def found_by_sglang() -> str:
    """Return the names of this plugin's entry points, after checking that Python finds them.

    Raises:
        RuntimeError: an entry point is missing, or belongs to another package.
    """
    for group, (name, value) in ENTRY_POINTS.items():
        found = [point.value for point in entry_points(group=group) if point.name == name]
        if found != [value]:
            others = [other for other in found if other != value]
            cure = f"uninstall the package with {others[0]}" if others else "reinstall sglang-dflash"
            what = f"is {found}, not only {value}" if found else "is missing"
            raise RuntimeError(f"entry point {name} in {group} {what}; {cure}")
    return " and ".join(name for name, _ in ENTRY_POINTS.values())


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection, which takes two thirds of the time to parse SGLang's source and frees nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def contract() -> str:
    """Check that the installed SGLang's source has all names that every server with DFLASH needs.

    With SGLANG_DFLASH_WORKER=stock, differences are only named.

    Raises:
        RuntimeError: SGLang has another version, or a name or a member is missing.
    """
    names, installed = [*SECTIONS["seams"], *SECTIONS["served"]], source.version()
    wrong = [f"sglang {installed} is installed"] if installed != SGLANG else []
    with no_collection():
        wrong += filter(None, map(source.problem, names))
    if wrong and flags.selects_stock(os.environ):
        return f"{', '.join(wrong)}; only SGLang's own worker can serve DFLASH"
    if wrong:
        cure = f"install the unmodified release sglang {SGLANG}, or set SGLANG_DFLASH_WORKER=stock"
        raise RuntimeError(f"{', '.join(wrong)}; {cure}")
    return f"sglang {SGLANG} has the {len(names)} names that every server with DFLASH needs"
