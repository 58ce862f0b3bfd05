"""A process that imports SGLang once and forks servers. Each is ready in seconds instead of a minute.

    python tests/server/lib/forker.py FD

Reads orders from the socket `FD`, one JSON document a line, and answers each with one:

    {"argv": [...], "env": {...}, "log": "path"}  starts `python -m sglang.launch_server argv...`; answers {"pid": 7}
    {"pid": 7}                                    answers {"status": null} while it runs, then its exit status

A forked server runs as one from the command line does. SGLang spawns its processes, and a spawned process loads the
plugins itself. So each process here forks spares before it loads anything, and a spawned process begins as a spare.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing import (
    context,
    forkserver,
    popen_fork,
    popen_forkserver,
    process,
    reduction,
    resource_tracker,
    spawn,
)
from pathlib import Path
from typing import Any, NoReturn

# What a server's processes import of SGLang before they load plugins or soon after.
SGLANG = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.models.registry",
    "sglang.srt.model_loader.loader",
    "sglang.srt.speculative.spec_info",
    "sglang.srt.arg_groups.pipeline",
)
N_SPARES = 4  # processes that one process may spawn: two ranks and a detokenizer, and one more


class Spares:
    """Forks of this process from before it loaded plugins, each waiting to run what this process spawns."""

    def __init__(self) -> None:
        self.waiting: list[socket.socket] = []

    def fork(self) -> None:
        """Fork `N_SPARES`; returns in this process only."""
        for _ in range(N_SPARES):
            ours, theirs = socket.socketpair()
            if not os.fork():
                for channel in (ours, *self.waiting):  # its end shows a spare that this process has ended
                    channel.close()
                self.waiting = []
                self._run(theirs)
            theirs.close()
            self.waiting.append(ours)

    def take(self, fds: list[int]) -> tuple[int, int]:
        """Wake a spare. In the place of `forkserver.connect_to_new_process`, with the same result."""
        channel = self.waiting.pop(0)
        status_r, status_w = os.pipe()
        data_r, data_w = os.pipe()
        with channel:
            reduction.sendfds(channel, [data_r, status_w, resource_tracker.getfd(), *fds])
        os.close(data_r)
        os.close(status_w)
        return status_r, data_w

    def _run(self, channel: socket.socket) -> NoReturn:
        """Wait for a process object, and be that process."""
        try:
            data_r, status_w, tracker, *inherited = reduction.recvfds(channel, forkserver.MAXFDS_TO_SEND)
        except EOFError:  # nothing is spawned any more
            os._exit(0)
        channel.close()
        begin()
        forkserver.write_signed(status_w, os.getpid())  # stays open: its end is how the parent's `join` wakes up
        resource_tracker._resource_tracker._fd = tracker
        forkserver._forkserver._inherited_fds = inherited
        status = 1
        try:
            status = spawn._main(data_r, os.dup(data_r))
        finally:
            os._exit(status)


SPARES = Spares()


class Popen(popen_forkserver.Popen):
    """A spawned process that a spare becomes. Unlike a fork server's, it is a child of the process that spawned it."""

    method = "spawn"
    poll = popen_fork.Popen.poll


def spawn_from_spares() -> None:
    """Have multiprocessing's spawned processes begin as spares, with the environment that a spawned one inherits."""

    def with_environment(name: str, original: Any = spawn.get_preparation_data) -> dict[str, Any]:
        return original(name) | {"environment": dict(os.environ)}

    def prepare(data: dict[str, Any], original: Any = spawn.prepare) -> None:
        set_environment(data["environment"])
        original(data)

    spawn.get_preparation_data, spawn.prepare = with_environment, prepare
    forkserver.connect_to_new_process = SPARES.take
    context.SpawnProcess._Popen = staticmethod(Popen)


def set_environment(env: dict[str, str]) -> None:
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)


def begin() -> None:
    """What an interpreter does when it starts, and a fork does not; then fork the spares of this process."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.seed()
    process.current_process().authkey = os.urandom(32)
    SPARES.fork()


def serve(order: dict[str, Any]) -> None:
    """Be `python -m sglang.launch_server`, the leader of a process group of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, path, mode in ((0, os.devnull, os.O_RDONLY), (1, order["log"], os.O_WRONLY | os.O_APPEND)):
        opened = os.open(path, mode)
        os.dup2(opened, stream)
        os.close(opened)
    os.dup2(1, 2)
    # What importing set stays: a platform chooses Triton's interpreter so, for all processes after it.
    set_environment(IMPORTED | order["env"])
    sys.argv = ["sglang.launch_server", *order["argv"]]
    begin()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def main(channel: socket.socket) -> None:
    """Obey orders until the other end is closed, or this process has become a server."""
    with channel, channel.makefile("rw") as lines:
        for line in lines:
            order = json.loads(line)
            if "argv" in order:
                sys.stdout.flush()
                pid = os.fork()
                if not pid:
                    break
                reply: dict[str, Any] = {"pid": pid}
            else:
                pid, status = os.waitpid(order["pid"], os.WNOHANG)
                reply = {"status": os.waitstatus_to_exitcode(status) if pid else None}
            lines.write(json.dumps(reply) + "\n")
            lines.flush()
        else:
            return
    serve(order)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who gives the orders
    sys.path[0] = str(Path(__file__).parents[3])
    from sglang_dflash.cpu import activate

    resource_tracker.ensure_running()  # one for all servers, which outlives those that are killed
    before = dict(os.environ)
    activate()  # may choose Triton's interpreter, by a variable that a scheduler process finds when it starts
    for module in SGLANG:
        import_module(module)
    IMPORTED = {name: value for name, value in os.environ.items() if before.get(name) != value}
    spawn_from_spares()
    gc.freeze()  # collections in children would copy what they share
    with suppress(BrokenPipeError):
        main(socket.socket(fileno=int(sys.argv[1])))
