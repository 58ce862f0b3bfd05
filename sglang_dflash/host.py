"""The host contract: every SGLang name this package hooks, overrides or calls, as data.

`require` compares the table with the SGLang that is running and stops at the first difference. One line per name: add
one when you import a name, override a method or rely on a parameter. The same table is checked against SGLang's
source by `tests/host`, without importing it.
"""

import importlib
import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang_dflash.errors import HostMismatch
from sglang_dflash.version import __version__

SGLANG = "0.5.23"


class Name(NamedTuple):
    """One name of the host.

    Attributes:
        module: where it is defined or re-exported.
        qualname: `function`, `Class` or `Class.method`.
        members: blank-separated; a function's parameters, or a class's fields, methods and instance attributes.
    """

    module: str
    qualname: str
    members: str = ""


# What `plugin.register` itself needs. Checked in every process.
SEAMS = (
    Name("sglang.srt.plugins.hook_registry", "HookRegistry", "register apply_hooks _patched"),
    Name("sglang.srt.plugins.hook_registry", "HookRegistry.register", "target hook hook_type"),
    Name("sglang.srt.plugins.hook_registry", "HookType", "AROUND AFTER"),
    Name("sglang.srt.arg_groups.resolution_hooks", "register_resolution_hook", "name"),
    Name("sglang.srt.arg_groups.overrides", "resolving_view", "server_args"),
    Name("sglang.srt.arg_groups.overrides", "attention_backends_of", "cfg"),
    Name("sglang.srt.arg_groups.overrides", "declare_resolution", "server_args source"),
    Name("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm", "is_dflash create_worker"),
    Name("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm.create_worker", "server_args"),
    Name("sglang.srt.server_args", "ServerArgs", "add_cli_args"),
)

# What the rest of the package needs. Checked when DFLASH is served.
NAMES = (
    Name("sglang.srt.arg_groups.model_override_base", "model_config_of", "server_args"),
    Name("sglang.srt.configs.model_config", "ModelConfig", "hf_config hf_text_config hidden_size vocab_size dtype"),
    Name("sglang.srt.models.registry", "ModelRegistry", "models"),
    Name("sglang.srt.runtime_context", "attn_dp_enabled_of", "cfg"),
)


def require_seams() -> None:
    """Check the version and the names that hooks are put on.

    Raises:
        HostMismatch: another SGLang, or one that lacks a seam.
    """
    version = importlib.import_module("sglang").__version__
    if version != SGLANG:
        raise HostMismatch(_sentence(f"sglang {version} is installed"))
    check(SEAMS)


def require() -> None:
    """Check everything.

    Raises:
        HostMismatch: see `require_seams`.
    """
    require_seams()
    check(NAMES)


def require_hooks(*targets: str) -> None:
    """Check that SGLang applied our hooks; it logs and ignores a plugin or a hook that it cannot load.

    Raises:
        HostMismatch: a hook is not in place.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target in targets:
        if target not in HookRegistry._patched:
            raise HostMismatch(
                f"sglang-dflash is installed but does not hook {target}: SGLANG_PLUGINS or SGLANG_PLATFORM leaves it "
                "out, or SGLang's log says why; include sglang_dflash, or set SGLANG_DFLASH_WORKER=stock"
            )


def check(names: Iterable[Name]) -> None:
    """Compare names with the running SGLang."""
    for name in names:
        found = _resolve(name)
        known = _members(found)
        for member in name.members.split():
            if member not in known:
                kind = "parameter" if inspect.isroutine(found) else "member"
                raise HostMismatch(_sentence(f"{name.qualname} has no {kind} {member!r}"))


def _resolve(name: Name) -> Any:
    try:
        found = importlib.import_module(name.module)
    except ModuleNotFoundError:
        raise HostMismatch(_sentence(f"there is no module {name.module}")) from None
    for part in name.qualname.split("."):
        if not hasattr(found, part):
            raise HostMismatch(_sentence(f"{name.module} has no {name.qualname}"))
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
        for function in filter(inspect.isfunction, vars(base).values()):
            members |= set(function.__code__.co_names)  # attributes that a method sets
    return members


def _sentence(found: str) -> str:
    version = importlib.import_module("sglang").__version__
    subject = found if found.startswith("sglang ") else f"sglang {version}: {found}"
    return f"{subject}; sglang-dflash {__version__} needs sglang {SGLANG}"
