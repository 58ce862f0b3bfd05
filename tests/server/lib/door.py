"""Launches of a server by a program that builds `ServerArgs` itself, as trainers do.

    python -m tests.server.lib.door DOOR '{"model_path": ...}' --host H --port P

`launch`: `launch_server` in this process. `child`: the same in a spawned process. `process`: SGLang's
`launch_server_process`, which resolves the arguments before it forks. `resolved`: arguments that were resolved without
this package's platform and plugins, as with SGLANG_PLATFORM or SGLANG_PLUGINS.
"""

import json
import multiprocessing
import os
import signal
import sys


def launch(server_args) -> None:
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(server_args)


def in_child(server_args) -> None:
    child = multiprocessing.get_context("spawn").Process(target=launch, args=(server_args,))
    child.start()
    child.join()
    sys.exit(child.exitcode)


def in_process(server_args) -> None:
    from sglang.srt.entrypoints.http_server_engine import launch_server_process
    from sglang.srt.utils import kill_process_tree

    child = launch_server_process(server_args)
    signal.signal(signal.SIGTERM, lambda *_: kill_process_tree(os.getpid()))
    child.join()


def resolved(server_args) -> None:
    from sglang.srt.arg_groups import resolution_hooks

    from sglang_dflash.cpu.platform import CpuPlatform

    early, require = dict(resolution_hooks._HOOKS), CpuPlatform.supports_speculative_algorithm
    resolution_hooks._HOOKS.clear()
    CpuPlatform.supports_speculative_algorithm = lambda self, algorithm: True
    server_args.resolve_once()
    CpuPlatform.supports_speculative_algorithm = require
    resolution_hooks._HOOKS.update(early)
    launch(server_args)


DOORS = {"launch": launch, "child": in_child, "process": in_process, "resolved": resolved}


def main(door: str, fields: str, _host: str, host: str, _port: str, port: str) -> None:
    from sglang.srt.server_args import ServerArgs

    DOORS[door](ServerArgs(**json.loads(fields), host=host, port=int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
