"""Loading of SGLang's plugins at the first step of argument resolution.

A program that embeds SGLang, such as a trainer, builds `ServerArgs` itself. SGLang's `launch_server` then resolves the
arguments before it loads plugins, so hooks on the resolution would not run. But SGLang resolves its platform earlier,
when its utilities are imported. For that it calls this package's `cpu.activate`, also on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FIRST = "handle_deprecated_dp_attention"  # the first step of SGLang's resolution


def load_before_resolution() -> None:
    """Wrap the first step of every resolution in this process, so that plugins are loaded by then."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(FIRST)(load_plugins_first)


def load_plugins_first(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Load plugins, unless they are loaded. SGLang looks up the hooks of each later step when the step runs."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    previous(server_args)
