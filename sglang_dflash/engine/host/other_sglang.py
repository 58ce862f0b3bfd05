"""Behaviour with an SGLang that this package does not support: another version, or a modified one.

A launch without DFLASH runs as without this package, and one warning says so. A launch with DFLASH is refused before
weights are loaded, because SGLang's own worker would serve it unnoticed. `SGLANG_DFLASH_WORKER=stock` allows that.

Nothing is known about such an SGLang. A guard is set only where SGLang has the name that it hooks, and each guard is
sufficient alone. If none can be set, the command line decides.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import parent_process
from operator import attrgetter
from typing import Any

from sglang_dflash import flags
from sglang_dflash.errors import HostMismatch

logger = logging.getLogger(__name__)

STEP = "handle_speculative_decoding"  # step of the resolution of arguments, before weights are loaded
# Methods that get the server's arguments: the first in the launching process, before weights are loaded, the second in
# each scheduler.
GUARDED = (
    ("sglang.srt.server_args", "ServerArgs.check_server_args"),
    ("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm.create_worker"),
)


def stand_aside(mismatch: HostMismatch) -> None:
    """Let launches without DFLASH run, and refuse the others.

    Raises:
        SystemExit: the command line asks for DFLASH, and no guard can be set.
    """
    if flags.selects_stock(os.environ):
        logger.warning("%s; sglang-dflash is inactive (SGLANG_DFLASH_WORKER=stock)", mismatch)
        return
    refusal = with_cure(mismatch)
    if parent_process() is None:  # SGLang loads plugins in each of its processes
        logger.warning("%s; only launches with DFLASH are refused", mismatch)
    if not guard_methods(refusal) and names_dflash(sys.argv):
        # SystemExit, because SGLang would log and ignore an Exception.
        sys.exit(str(refusal))


def with_cure(mismatch: HostMismatch) -> HostMismatch:
    return HostMismatch(f"{mismatch}; install that release, or set SGLANG_DFLASH_WORKER=stock")


def guard_methods(refusal: HostMismatch) -> int:
    """Hook the methods `GUARDED` that SGLang has, and return their number."""
    with suppress(ImportError, AttributeError):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        found = [name for name in GUARDED if has(*name)]
        for module, method in found:
            HookRegistry.register(f"{module}.{method}", partial(refuse, refusal), HookType.AROUND)
        return len(found)
    return 0


def guard_resolution(mismatch: HostMismatch) -> None:
    """Hook the resolution of arguments, if SGLang has such hooks."""
    refusal = with_cure(mismatch)
    with suppress(ImportError, ValueError):  # ValueError: there is no such step
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook(STEP)(lambda server_args, previous: refuse(refusal, previous, server_args))


def refuse(refusal: HostMismatch, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Raise `refusal` if an argument is the `ServerArgs` of a server with DFLASH, else call SGLang's method.

    With `SGLANG_DFLASH_WORKER=stock` nothing is refused.
    """
    if any(asks_for_dflash(value) for value in (*args, *kwargs.values())) and not flags.selects_stock(os.environ):
        raise refusal
    return stock(*args, **kwargs)


def asks_for_dflash(server_args: object) -> bool:
    """Return whether an object is the arguments of a server with DFLASH."""
    with suppress(AttributeError):
        return str(attrgetter("speculative_algorithm")(server_args)).upper() == "DFLASH"
    return False


def names_dflash(argv: Sequence[str]) -> bool:
    return any(word.upper().removeprefix("--SPECULATIVE-ALGORITHM=") == "DFLASH" for word in argv)


def has(module: str, qualname: str) -> bool:
    """Return whether SGLang has a name."""
    try:
        attrgetter(qualname)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True
