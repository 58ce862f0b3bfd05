"""Servers that are forked from a process which has imported SGLang: see `forker`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from sglang_dflash.servers.arms import SERVE
from sglang_dflash.servers.server import Server

FORKER = Path(__file__).with_name("forker.py")
# Read when SGLang, torch or Triton is imported: servers that differ in one of these are forked by different processes.
EARLY = ("SGLANG_DFLASH_REHEARSE",)
# Read after that. With any other variable a server is started from its command line.
LATE = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
    "SGLANG_MAMBA_CONV_DTYPE",
)


class Forker:
    """The process that forks, and the orders it is given."""

    def __init__(self, env: dict[str, str]) -> None:
        """
        Args:
            env: variables on top of this process's own, for whatever is imported.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, FORKER, str(theirs.fileno())],
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._lines, self._lock = ours.makefile("rw"), threading.Lock()
        ours.close()

    def order(self, **what: Any) -> dict[str, Any]:
        """Give one order and return the answer."""
        with self._lock:
            self._lines.write(json.dumps(what) + "\n")
            self._lines.flush()
            answer = self._lines.readline()
        assert answer, f"the forking process ended with status {self._process.wait()}"
        return json.loads(answer)

    def stop(self) -> None:
        """Servers that it has forked are stopped by then."""
        self._lines.close()
        self._process.wait()


class ForkedProcess:
    """As much of `subprocess.Popen` as `Server` needs."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self.forker, self.pid = forker, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.forker.order(pid=self.pid)["status"]
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.05)
        assert self.returncode is not None
        return self.returncode


class ForkedServer(Server):
    """A server that `forker` starts, and that ends at once: SGLang takes 5 s to leave after SIGTERM."""

    ENDED_BY = (signal.SIGCONT, signal.SIGKILL)

    def __init__(self, forker: Forker, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._forker = forker

    def _spawn(self, log: IO[bytes]) -> ForkedProcess:
        argv = self.command[len(SERVE) :]
        return ForkedProcess(
            self._forker, self._forker.order(argv=argv, env=os.environ | self.env, log=log.name)["pid"]
        )


class Forkers:
    """One forker for each environment that is read at import; each starts when it is first needed."""

    def __init__(self) -> None:
        self.running: dict[tuple[bool, ...], Forker] = {}

    def server(self, command: list[str], env: dict[str, str], **options: Any) -> Server:
        """A server that is forked, or that its command line starts: with variables that something may read early."""
        if not all(name in EARLY + LATE or name.startswith("SGLANG_DFLASH_") for name in env):
            return Server(command, env=env, **options)
        kind = tuple(name in env for name in EARLY)
        if kind not in self.running:
            self.running[kind] = Forker({name: env[name] for name in (*EARLY, *LATE) if name in env})
        return ForkedServer(self.running[kind], command, env=env, **options)

    def stop(self) -> None:
        for forker in self.running.values():
            forker.stop()
