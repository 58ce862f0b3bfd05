"""Servers forked from a process that has imported SGLang, unless their environment must be set before the import."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sglang_dflash.pairs.servers.arms import SERVE
from sglang_dflash.pairs.servers.server import Process, Server
from tests.fixtures.forking import ForkedProcess
from tests.tools.parameters import REFERENCE_ENV

# Variables that are read when a server starts, not when SGLang is imported. They do not keep `make_server` from
# forking.
READ_LATER = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "SGLANG_CHECK_KV_PAGE_INVARIANTS",
    "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_MAMBA_CONV_DTYPE",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH", "SGLANG_TEST_RETRACT",
)  # fmt: skip


class ForkedServer(Server):
    """Forked server that is stopped by SIGKILL, because SGLang takes 5 s to exit after SIGTERM."""

    ENDED_BY = (signal.SIGCONT, signal.SIGKILL)

    def _spawn(self, log: IO[bytes]) -> Process:
        argv = self.command[len(SERVE) :]
        path = self.env.get("PYTHONPATH", "")
        return ForkedProcess(SERVE[-1], argv, os.environ | self.env, out=Path(log.name), err=Path(log.name), path=path)


def make_server(command: Sequence[str], env: Mapping[str, str], **options: Any) -> Server:
    """Return a server, not started. It is forked unless SGLang's import may read a variable of `env`.

    Variables SGLANG_DFLASH_* do not prevent forking. Reference servers set PYTHONPATH (`REFERENCE_ENV`) and have a
    forking process of their own.
    """
    early = {name: env[name] for name in env if name not in READ_LATER and not name.startswith("SGLANG_DFLASH_")}
    forks = early in ({}, REFERENCE_ENV)
    return (ForkedServer if forks else Server)(command, env=env, **options)
