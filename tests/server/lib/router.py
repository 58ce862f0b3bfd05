"""SGLang's router in front of running servers, and a count of the prefill batches of each server."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Server

# The router notices a dead server within seconds, and resends its unanswered requests to another.
FLAGS = (
    *("--policy", "cache_aware", "--cache-threshold", "0.3"),
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "1", "--retry-max-retries", "5"),
)

REGISTERED_S = 60.0  # longest wait until the router has registered all servers


@contextmanager
def routed(servers: Sequence[Server], folder: Path) -> Iterator[Server]:
    """Start a router in front of running servers; it has the HTTP API of a server."""
    urls = [server.url for server in servers]
    prometheus = free_port(29850)
    command = [sys.executable, "-m", "sglang_router.launch_router", *FLAGS, "--prometheus-port", str(prometheus)]
    command += ["--worker-urls", *urls]
    with Server(command, port=free_port(29800), log=folder / "router.log", env={}, name="router") as router:
        deadline = time.monotonic() + REGISTERED_S  # the router answers before it has registered its servers
        while not all(f"{url}" in router.log_text() for url in urls) or not serves(router):
            assert time.monotonic() < deadline, router.log_tail()
            time.sleep(0.5)
        yield router


def serves(router: Server) -> bool:
    try:
        return bool(router.generate([5], max_new_tokens=1).token_ids)
    except ServerError:
        return False


def n_answered(server: Server) -> int:
    """Return the number of prefill batches in the server's log; it grows when the server gets requests."""
    return server.log_text().count("Prefill batch")


def end(server: Server) -> None:
    for process in server.processes():
        process.kill()
