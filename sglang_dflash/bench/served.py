"""An arm whose server the benchmark starts and stops itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from sglang_dflash.bench.arms import Launch, require_worker
from sglang_dflash.bench.chat import Kind, Sampling
from sglang_dflash.bench.engine import HttpEngine, Processes
from sglang_dflash.bench.errors import ServerError
from sglang_dflash.bench.ports import free_port
from sglang_dflash.bench.progress import wait_ready
from sglang_dflash.bench.server import Server

GIB_PER_SERVER = 3  # host memory of one serving process group, importing SGLang and torch


class ServedEngine(HttpEngine):
    """A server that is started when its turn comes, or that waits for it off the CPU.

    Invariant: outside `running` it has no CPU time; with `keep` it stays in memory there.
    """

    def __init__(self, launch: Launch, *, sampling: Sampling, log: Path, port: int, console: Console) -> None:
        self.launch, self.console, self.keep = launch, console, False
        port = free_port(port)
        self.server = Server(launch.command, port=port, log=log, env=launch.env, name=launch.name)
        super().__init__(launch.name, self.server.url, sampling=sampling)

    @property
    def processes(self) -> Processes:
        return self.server.processes

    @contextmanager
    def running(self) -> Iterator[None]:
        if self.keep:
            self.server.resume()
            try:
                yield
            finally:
                self.server.pause()
            return
        self.server.start()
        try:
            wait_ready([self.server], self.console)
            self.check()
            yield
        finally:
            self.server.stop()

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"command": self.launch.command, "env": dict(self.launch.env)}

    def check(self) -> None:
        """The server that answers is the one that was asked for."""
        require_worker(self.server, ours=self.launch.ours)
        self.meet(Kind.SGLANG)


def require_memory(n_servers: int, gib_per_server: float, instead: str) -> None:
    """
    Raises:
        ServerError: less host memory is free; `instead` says what to do then.
    """
    free_gib, needed_gib = psutil.virtual_memory().available / 2**30, gib_per_server * n_servers
    if free_gib < needed_gib:
        raise ServerError(
            f"{n_servers} servers need about {needed_gib:.0f} GiB of host memory and {free_gib:.0f} are free; {instead}"
        )


def start_together(servers: Sequence[Server], console: Console) -> None:
    """Start them side by side, and wait until all answer.

    Raises:
        ServerError: too little memory for all of them, or one does not start.
    """
    require_memory(len(servers), GIB_PER_SERVER, "use --one-at-a-time, or fewer --arms")
    for server in servers:
        server.start()
    wait_ready(servers, console)


@contextmanager
def kept_in_memory(engines: Sequence[ServedEngine], console: Console) -> Iterator[None]:
    """All servers started and paused; stopped at the end."""
    try:
        start_together([engine.server for engine in engines], console)
        for engine in engines:
            engine.check()
            engine.server.pause()
            engine.keep = True
        yield
    finally:
        for engine in engines:
            engine.server.stop()
