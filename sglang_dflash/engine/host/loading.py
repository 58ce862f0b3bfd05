"""Loading of SGLang's plugins at the first step of argument resolution, and checks of what a process has loaded.

A program that embeds SGLang, such as a trainer, builds `ServerArgs` itself. SGLang's `launch_server` then resolves the
arguments before it loads plugins, so hooks on the resolution would not run. But SGLang chooses its platform earlier,
when its utilities are imported. To do so it calls `platforms.cpu.activate`, also on a GPU, and that call hooks the
first step of the resolution.

A process may launch several engines, with changed variables. Each resolution reads the variables again. Schedulers are
new processes that read them too, so a launch is refused if they would read other values. A launch on a port that is
taken is refused too.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from sglang_dflash import flags
from sglang_dflash.engine.host.arguments import UNSUPPORTED
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import Worker

REHEARSE = "SGLANG_DFLASH_REHEARSE"
AT_IMPORT = os.environ.get(REHEARSE, "off")  # SGLang imports this module when it chooses the platform of the process
HTTP_LAUNCH = ("sglang.srt.entrypoints.http_server", "launch_server")
FIRST = "handle_deprecated_dp_attention"  # the first step of SGLang's resolution


def load_before_resolution() -> None:
    """Wrap the first step of every resolution in this process, so that plugins are loaded by then."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(FIRST)(load_plugins_first)


def load_plugins_first(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Load plugins, unless they are loaded. Later steps of the resolution then find the plugin's hooks."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    previous(server_args)


def read_flags_again() -> None:
    """Let `flags.current` read the environment anew, because another engine may have been launched before.

    Raises:
        NotSupported: SGLANG_DFLASH_REHEARSE has changed, but SGLang has already chosen the platform of this process.
    """
    flags.current.cache_clear()
    now = os.environ.get(REHEARSE, "off")
    if now != AT_IMPORT:
        raise NotSupported(
            f"{REHEARSE} was {AT_IMPORT} when SGLang was imported, and is {now} now; set it in a new process, before "
            "the import"
        )


def require_free_port(server_args: Any) -> None:
    """Check before weights load that the HTTP server can listen on its port.

    SGLang itself tries the port only after it has loaded all weights.

    Raises:
        NotSupported: another process listens on the port.
    """
    if server_args.node_rank or server_args.enable_http_worker_reuseport:
        return  # this process does not listen, or shares the port
    try:
        where = socket.getaddrinfo(server_args.host, server_args.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(*where[:3]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the HTTP server does
            probe.bind(where[4])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise NotSupported(
                f"--port {server_args.port} of {server_args.host} is in use by another process; stop it, or give "
                "another --port"
            ) from None


def is_for_http() -> bool:
    """Return whether SGLang's HTTP server is being launched, rather than an `Engine`, which listens on no port."""
    frame = sys._getframe()
    while caller := frame.f_back:
        frame = caller
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == HTTP_LAUNCH:
            return True
    return False


def require_same_flags() -> None:
    """Check that variables are unchanged since the arguments were resolved. New processes read the present values.

    Raises:
        NotSupported: a variable has changed.
    """
    if flags.read(os.environ) != flags.current():
        raise NotSupported(
            "variables of sglang-dflash have changed since the arguments were resolved; set them before you build "
            "ServerArgs, or restore them"
        )


def refuse_ray() -> None:
    """Refuse SGLang's Ray engine, unless SGLang's own worker is selected.

    Raises:
        NotSupported: Ray would run the schedulers.
    """
    if flags.current().worker is Worker.PLUGIN and "sglang.srt.ray.engine" in sys.modules:
        raise NotSupported(
            f"SGLang's Ray engine is not supported with DFLASH ({UNSUPPORTED['use_ray']}); launch without Ray, or set "
            "SGLANG_DFLASH_WORKER=stock"
        )
