"""Fixtures that undo a test's changes: cached environment flags, and hooks on SGLang's functions."""

import sys
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import pytest

from sglang_dflash import flags


@pytest.fixture(autouse=True)
def flags_are_read_again() -> None:
    flags.current.cache_clear()


@pytest.fixture(autouse=True)
def hooks_are_taken_off() -> Iterator[None]:
    """Remove hooks that a test has set. Hooks of a loaded plugin stay: SGLang loads a plugin only once per process."""
    yield
    if module := sys.modules.get("sglang.srt.plugins.hook_registry"):
        registry = module.HookRegistry
        for target, hooks in list(registry._hooks.items()):
            if all(plugin is None for *_, plugin in hooks):
                del registry._hooks[target]
                if target in registry._patched:
                    registry._patched.remove(target)
                    take_off(target, module.__file__)


def take_off(target: str, registry: str) -> None:
    """Replace the hooked `target` by the original function, in its owner and in every module that imported it.

    `registry` is the path of the file that defines the wrappers.
    """
    path, _, name = target.rpartition(".")
    owner: Any = resolve_name(path)
    hooked = vars(owner)[name]
    kind = type(hooked) if isinstance(hooked, staticmethod | classmethod) else None
    original = hooked.__func__ if kind else hooked
    while original.__code__.co_filename == registry:
        original = original.__wrapped__
    setattr(owner, name, kind(original) if kind else original)
    for module in list(sys.modules.values()):
        for other, value in list(vars(module).items()) if module else ():
            if value is hooked:
                setattr(module, other, original)
