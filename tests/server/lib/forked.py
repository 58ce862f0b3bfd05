"""Servers forked from a process that has imported SGLang, where this makes no difference."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sglang_dflash.servers.arms import SERVE
from sglang_dflash.servers.server import Process, Server
from tests.fixtures.forking import ForkedProcess
from tests.tools.parameters import REFERENCE_ENV

# Variables read when a server starts, not at import. Other variables require a start from the command line.
READ_LATER = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "SGLANG_CHECK_KV_PAGE_INVARIANTS",
    "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_MAMBA_CONV_DTYPE",
    "SGLANG_TEST_RETRACT",
)  # fmt: skip


class ForkedServer(Server):
    """Forked server that ends at once: SGLang takes 5 s to exit after SIGTERM."""

    ENDED_BY = (signal.SIGCONT, signal.SIGKILL)

    def _spawn(self, log: IO[bytes]) -> Process:
        argv = self.command[len(SERVE) :]
        path = self.env.get("PYTHONPATH", "")
        return ForkedProcess(SERVE[-1], argv, os.environ | self.env, out=Path(log.name), err=Path(log.name), path=path)


def make_server(command: Sequence[str], env: Mapping[str, str], **options: Any) -> Server:
    """Return a server, not started, which is forked if no variable of `env` is read at import.

    Servers without speculation share the PYTHONPATH of references, so they have a forking process of their own.
    """
    early = {name: env[name] for name in env if name not in READ_LATER and not name.startswith("SGLANG_DFLASH_")}
    forks = early in ({}, REFERENCE_ENV)
    return (ForkedServer if forks else Server)(command, env=env, **options)
