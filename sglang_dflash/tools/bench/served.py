"""Arm whose server the benchmark starts and stops itself."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from sglang_dflash.pairs.servers.arms import ServerCommand, require_worker
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.progress import wait_ready
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.tools.bench.client import HttpEngine, ServerKind
from sglang_dflash.tools.bench.engine import Processes

GIB_PER_SERVER = 3  # GiB of host memory of one server's processes, most of it SGLang and torch


class ServedEngine(HttpEngine):
    """Server that `running` starts and stops. If `keep` is set, `running` resumes and pauses the server instead.

    Invariant: once `keep` is set, the server gets no CPU time outside the context `running`.
    """

    def __init__(self, launch: ServerCommand, *, log: Path, port: int, console: Console) -> None:
        self.launch, self.console, self.keep = launch, console, False
        self.server = Server(launch.command, port=free_port(port), log=log, env=launch.env, name=launch.name)
        super().__init__(launch.name, self.server.url)

    @property
    def processes(self) -> Processes:
        return self.server.processes

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            if self.keep:
                self.server.resume()
            else:
                self.server.start()
                wait_ready([self.server], self.console)
                self.check()
            yield
        finally:
            (self.server.pause if self.keep else self.server.stop)()

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"command": self.launch.command, "env": dict(self.launch.env)}

    def check(self) -> None:
        """Check that the server runs the arm's worker, and determine the model's name."""
        require_worker(self.server, ours=self.launch.ours)
        self.meet(ServerKind.SGLANG)


@contextmanager
def kept_in_memory(engines: Sequence[ServedEngine], console: Console) -> Iterator[None]:
    """Start and pause all servers; stop them at the end.

    Servers with this plugin's worker start one by one, because they measure step times at launch. All other servers
    start in parallel.

    Raises:
        ServerError: there is too little memory, or a server does not start or has the wrong worker.
    """
    free_gib, needed_gib = psutil.virtual_memory().available / 2**30, GIB_PER_SERVER * len(engines)
    if free_gib < needed_gib:
        need = f"{len(engines)} servers need about {needed_gib:.0f} GiB of host memory and {free_gib:.0f} are free"
        raise ServerError(f"{need}; use --one-at-a-time, or fewer --arms")
    others = [engine for engine in engines if not engine.launch.ours]
    try:
        for started in (*([engine] for engine in engines if engine.launch.ours), others):
            for engine in started:
                engine.server.start()
            wait_ready([engine.server for engine in started], console)
            for engine in started:
                engine.check()
                engine.server.pause()
                engine.keep = True
        yield
    finally:
        with ExitStack() as stack:  # an error of one stop must not leave other servers running
            for engine in engines:
                stack.callback(engine.server.stop)
