"""Properties of the emulated GPU for SGLang's attention code.

SGLang reads these properties while arguments are resolved (`at_launch`) and while an attention backend is created
(`answering`). Other code sees a CPU, except where `qwen`, `overlap` and `flashinfer_seams` replace its checks.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from sglang_dflash import flags
from sglang_dflash.platforms.cpu import install

Function = TypeVar("Function", bound=Callable)


class Gpu(NamedTuple):
    """Emulated GPU. Among the GPUs with its compute capability it has the most multiprocessors."""

    capability: tuple[int, int]
    n_processors: int


GPUS = {
    "sm80": Gpu((8, 0), 108),
    "sm89": Gpu((8, 9), 142),
    "sm90": Gpu((9, 0), 132),
    "sm100": Gpu((10, 0), 148),
    "sm120": Gpu((12, 0), 188),
}

_ATTENTION = "sglang.srt.layers.attention."
_RULES = "sglang.srt.arg_groups.attention_hook"


def rehearsed() -> Gpu:
    return GPUS[flags.current().rehearse.gpu]


def facts() -> dict[str, Any]:
    """Return the platform flags that SGLang's attention code reads, with their values for the emulated GPU."""
    gpu = rehearsed()
    major, minor = gpu.capability
    return {
        "is_sm90": major == 9,
        "is_sm100": major == 10,
        "is_sm100_or_sm110": major == 10,
        "is_sm120": major == 12,
        "is_blackwell": major >= 10,
        "device_capability": gpu.capability,
        "device_sm": 10 * major + minor,
        "has_flashinfer": True,
    }


@contextmanager
def answering() -> Iterator[None]:
    """Apply the flags of `facts` inside the context, and replace functions that query the GPU directly."""
    from sglang.srt.runtime_context import override_platform

    answers = facts()
    put: dict[str, Callable[..., Any]] = {
        _ATTENTION + "attention_registry.get_device_capability": lambda device_id=0: answers["device_capability"],
        _ATTENTION + "flashattention_backend.get_device_capability": lambda device_id=0: answers["device_capability"],
        "sglang.srt.utils.is_blackwell": lambda: answers["is_blackwell"],
    }
    before = {target: pkgutil.resolve_name(target) for target in put}
    with override_platform(**answers):
        try:
            install.put(put)
            yield
        finally:
            install.put(before)


def asks(fn: Function) -> Function:
    """Wrap `fn` so that capability queries inside it see the emulated GPU."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with answering():
            return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


def at_launch() -> None:
    """Apply the emulated GPU to the rules that resolve attention arguments: backends and page sizes."""
    from sglang.srt.runtime_context import PlatformContext, override_platform

    platform = PlatformContext()
    platform._install(**facts())
    rule = pkgutil.resolve_name(f"{_RULES}._fa4_page_constraint")

    @functools.wraps(rule)
    def fa4_page_constraint(view: Any) -> dict:
        with override_platform(**facts()):
            return rule(view)

    install.put({"get_platform": lambda: platform, "_fa4_page_constraint": fa4_page_constraint}, f"{_RULES}.")
