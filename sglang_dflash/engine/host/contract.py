"""Host contract: checks that the running SGLang has the modules, classes, functions and members that this package uses.

`check` compares the running SGLang with names from the file `sglang-0.5.23.txt`, and stops at the first difference.
`source.py` compares the same names with SGLang's source, without importing SGLang.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sglang_dflash import __version__, flags
from sglang_dflash.engine.host.names import HOOKS, SECTIONS, SGLANG, Name
from sglang_dflash.errors import HostMismatch
from sglang_dflash.flags import Worker

if TYPE_CHECKING:
    from sglang.srt.plugins.hook_registry import HookType

    Hooks = dict[str, tuple[Callable[..., Any], HookType]]


# Hooks that `plugin.register` sets.
AT_REGISTRATION = ("create_worker", "add_cli_args", "check_server_args", "read_draft", "draft_length", "draft_packing")


def other_version() -> HostMismatch | None:
    """Return an error with the versions if SGLang is not the supported one, else None."""
    version = importlib.import_module("sglang.version").__version__
    if version == SGLANG:
        return None
    return HostMismatch(f"sglang {version} is installed; sglang-dflash {__version__} needs sglang {SGLANG}")


def require_seams() -> None:
    """Check SGLang's version, and the names that `plugin.register` hooks or calls.

    Raises:
        HostMismatch: the version differs, or a name is missing, see `check`.
    """
    if mismatch := other_version():
        raise mismatch
    check(SECTIONS["seams"])


def require() -> None:
    """Check SGLang's version, and the names that every server with DFLASH uses. Features check further names.

    Raises:
        HostMismatch: see `require_seams`.
    """
    require_seams()
    check(SECTIONS["served"])


def require_hooks(*targets: str) -> None:
    """Check that SGLang has applied a hook to each of `targets`, names in the form "module.Class.method".

    The check is needed, because SGLang only logs an error if it cannot load a plugin or apply a hook.

    Raises:
        HostMismatch: a hook is not in place.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target in targets:
        if target not in HookRegistry._patched:
            raise HostMismatch(
                f"SGLang has not applied the hook of sglang-dflash to {target}; if SGLANG_PLUGINS is set, add "
                "sglang_dflash to it (without a GPU also sglang_dflash_cpu); if SGLANG_PLATFORM names another "
                "platform, unset it; if your program builds ServerArgs, call sglang.srt.plugins.load_plugins() first; "
                "else see the error in SGLang's log, or set SGLANG_DFLASH_WORKER=stock"
            )


def set_hooks(hooks: "Hooks") -> None:
    """Set hooks, each given under the name that it hooks, and check that SGLang has applied them.

    Raises:
        HostMismatch: see `require_hooks`.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for name, (hook, kind) in hooks.items():
        HookRegistry.register(name, hook, kind)
    HookRegistry.apply_hooks()
    require_hooks(*hooks)


def require_live() -> None:
    """Check that the hooks of `plugin.register` are applied, unless SGLang's own worker is selected.

    The CPU platform of this package also calls this function, because SGLang may load the platform without the plugin,
    for example with `SGLANG_PLUGINS=sglang_dflash_cpu`.

    Raises:
        HostMismatch: the plugin is not loaded, or SGLang could not apply one of the plugin's hooks.
    """
    if flags.current().worker is not Worker.STOCK:
        require_hooks(*(HOOKS[name] for name in AT_REGISTRATION))


def check(names: Iterable[Name]) -> None:
    """Check that the running SGLang has all `names`.

    Raises:
        HostMismatch: a module, name or member of SGLang is missing, or a module that SGLang itself imports is missing.
            The message names the first one.
    """
    for name in names:
        found = _resolve(name)
        known = _members(found)
        for member in name.members.split():
            if member not in known:
                kind = "parameter" if inspect.isroutine(found) else "member"
                raise HostMismatch(_sentence(name, f"{kind} {member!r} of {name.module}.{name.qualname}"))


def _resolve(name: Name) -> Any:
    try:
        found = importlib.import_module(name.module)
    except ModuleNotFoundError as error:
        if name.module.startswith(error.name or "."):
            raise HostMismatch(_sentence(name, f"module {name.module}")) from None
        raise HostMismatch(
            f"{name.module} imports {error.name}, which is not installed; sglang-dflash {__version__} needs "
            f"sglang {SGLANG} with its dependencies"
        ) from error
    for part in name.qualname.split("."):
        if not hasattr(found, part):
            raise HostMismatch(_sentence(name, f"{name.module}.{name.qualname}"))
        found = getattr(found, part)
    return found


def _members(found: Any) -> set[str]:
    if inspect.isroutine(found):
        return set(inspect.signature(found).parameters)
    if not inspect.isclass(found):
        return set(dir(found))
    members = set()
    for base in found.__mro__:
        members |= set(vars(base)) | set(inspect.get_annotations(base))
        methods = map(inspect.unwrap, filter(inspect.isfunction, vars(base).values()))
        for function in filter(inspect.isfunction, methods):  # torch wraps some functions that are written in C
            members |= set(function.__code__.co_names)  # attributes that the method uses
            members |= set(function.__code__.co_varnames[: function.__code__.co_argcount])  # parameters of the method
    return members


def _sentence(name: Name, missing: str) -> str:
    version = importlib.import_module("sglang").__version__
    if name.module.startswith("flashinfer"):
        return f"FlashInfer lacks {missing}; install the version of flashinfer-python that sglang {SGLANG} requires"
    return f"sglang {version} lacks {missing}; sglang-dflash {__version__} needs the unmodified release sglang {SGLANG}"
