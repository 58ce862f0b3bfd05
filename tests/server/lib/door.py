"""Launches of a server by a program that builds `ServerArgs` itself, as trainers do.

    python -m tests.server.lib.door DOOR '{"model_path": ...}' --host H --port P

`launch`: `launch_server` in this process. `child`: the same in a spawned process. `process`: SGLang's
`HttpServerEngineAdapter`, whose `launch_server_process` resolves the arguments before it forks. `runtime`: SGLang's
`Runtime`, which resolves them before it spawns. `resolved`: arguments that were resolved without this package's
platform and plugins, as with SGLANG_PLATFORM or SGLANG_PLUGINS.
"""

import json
import multiprocessing
import os
import signal
import sys
from typing import Any


def launch(**fields: Any) -> None:
    from sglang.srt.server_args import ServerArgs

    serve(ServerArgs(**fields))


def serve(server_args) -> None:
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(server_args)


def in_child(**fields: Any) -> None:
    from sglang.srt.server_args import ServerArgs

    child = multiprocessing.get_context("spawn").Process(target=serve, args=(ServerArgs(**fields),))
    child.start()
    child.join()
    sys.exit(child.exitcode)


def in_process(**fields: Any) -> None:
    from sglang.srt.entrypoints.http_server_engine import HttpServerEngineAdapter

    child = HttpServerEngineAdapter(**fields).process
    end_children_on_sigterm()
    child.join()


def runtime(**fields: Any) -> None:
    import sglang

    sglang.Runtime(log_level="info", **fields)
    end_children_on_sigterm()
    signal.pause()


def end_children_on_sigterm() -> None:
    from sglang.srt.utils import kill_process_tree

    signal.signal(signal.SIGTERM, lambda *_: kill_process_tree(os.getpid()))


def resolved(**fields: Any) -> None:
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash.platforms.cpu.platform import CpuPlatform

    server_args = ServerArgs(**fields)
    early, require = dict(resolution_hooks._HOOKS), CpuPlatform.supports_speculative_algorithm
    resolution_hooks._HOOKS.clear()
    CpuPlatform.supports_speculative_algorithm = lambda self, algorithm: True
    server_args.resolve_once()
    CpuPlatform.supports_speculative_algorithm = require
    resolution_hooks._HOOKS.update(early)
    serve(server_args)


DOORS = {"launch": launch, "child": in_child, "process": in_process, "runtime": runtime, "resolved": resolved}


def main(door: str, fields: str, _host: str, host: str, _port: str, port: str) -> None:
    DOORS[door](**json.loads(fields), host=host, port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
