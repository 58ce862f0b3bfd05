"""Servers whose steps are measured: settings, commands by arm, and a start that watches the clock."""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from env.gpu import dry, shared_layers
from env.gpu.clock import Clock
from env.gpu.plugin_folder import write_metadata
from sglang_dflash.pairs.servers import arms
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Pair

OFF, STOCK, OURS, WIDTH_1 = "off", "stock", "ours", "width 1"
# Acceptance lengths of the draft's model card, by block size.
DATA_SET, ACCEPTANCE = "MT-Bench", {16: 5.47, 8: 4.54}
COMMON = ("--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache", "--random-seed", "1")
NEXT_WAVE_S = 60.0  # seconds after which further servers start, even if the first one has not compiled its kernels
CAPTURES = "graph begin"  # in the log of a server that compiles its kernels, or has compiled them
FIRST_PORT = 31700


class Settings(NamedTuple):
    """Sizes of the measurement, and flags and environment of every server."""

    small: bool
    loads: tuple[tuple[int, int], ...]  # tokens of a prompt, and requests at once
    backend: str  # of attention
    steps: int  # per answer
    interval: int  # steps per line of SGLang's log
    rounds: int
    acceptance: Mapping[int, float]
    flags: tuple[str, ...]
    env: Mapping[str, str]


def sized(n_requests: int, n_tokens: int) -> tuple[str, ...]:
    """Return flags with explicit sizes of all pools, so that servers on one card do not measure each other's memory."""
    pools = ("--max-running-requests", n_requests, "--max-mamba-cache-size", n_requests, "--max-total-tokens", n_tokens)
    return tuple(map(str, pools))


GPU = Settings(
    small=False, loads=((256, 1), (256, 8), (256, 16), (256, 32)), backend="fa3", steps=64, interval=10, rounds=2,
    acceptance=ACCEPTANCE,
    flags=(
        *COMMON, *sized(32, 24576), "--sampling-backend", "pytorch",
        # SGLang leaves 5 % of the memory that was free at the server's start for activations.
        "--mem-fraction-static", "0.95", "--context-length", "8192", "--chunked-prefill-size", "8192",
        "--cuda-graph-bs-decode", "1", "8", "16", "32", "--cuda-graph-backend-prefill", "disabled",
    ),
    env={"HF_HUB_OFFLINE": "1"},
)  # fmt: skip
# One acceptance length, because SGLang reads it when it is imported: all servers are forked from one process.
DRY = Settings(
    small=True, loads=((16, 1), (16, 2)), backend="fa3", steps=16, interval=4, rounds=2,
    acceptance=dict.fromkeys((16, 8), 4.54),
    flags=(
        *COMMON, *sized(2, 4096), "--device", "cpu", "--dtype", "float32",
        "--cuda-graph-bs-decode", "1", "2", "--cuda-graph-backend-prefill", "disabled", "--sleep-on-idle",
    ),
    env={**tiny.ENV, "SGLANG_DFLASH_REHEARSE": "sm90", "HF_HUB_OFFLINE": "1"},
)  # fmt: skip


def environment(arm: str, block: int, settings: Settings) -> dict[str, str]:
    env = dict(settings.env)
    if arm == OFF:
        return env
    env["SGLANG_DFLASH_WORKER"] = "stock" if arm == STOCK else "plugin"
    if arm != STOCK:
        env["SGLANG_DFLASH_COPY"] = "off"
    if arm == WIDTH_1:  # a step of one token commits one token, also without simulation
        return env | {"SGLANG_DFLASH_WIDTHS": "1"}
    return env | simulated(block, settings)


def simulated(block: int, settings: Settings) -> dict[str, str]:
    """Return the variables that simulate acceptance."""
    values = {"LEN": str(settings.acceptance[block]), "METHOD": "match-expected", "TOKEN_MODE": "fixed"}
    return {f"SGLANG_SIMULATE_ACC_{name}": value for name, value in values.items()}


def command(arm: str, block: int, pair: Pair, settings: Settings) -> list[str]:
    """Return the command of an arm's server, without host and port."""
    log = ("--decode-log-interval", str(settings.interval))
    speculation = [*tiny.launch_flags(pair), "--speculative-num-draft-tokens", str(block)]
    flags = [*speculation, "--attention-backend", settings.backend, *settings.flags, *log]
    return [*arms.SERVE, *(arms.without_speculation(flags) if arm == OFF else flags)]


def make(arm: str, block: int, pair: Pair, settings: Settings, *, port: int, logs: Path, path: str) -> Server:
    """Return an arm's server, not started.

    Args:
        port: first port to try.
        logs: folder of its log.
        path: PYTHONPATH of the server.
    """
    server_class = dry.server_class(simulated(block, settings)) if settings.small else KilledServer
    name = arm if arm == OFF else f"{arm} {block}"
    return server_class(
        command(arm, block, pair, settings),
        port=free_port(port),
        log=logs / f"{name.replace(' ', '-')}.log",
        env=environment(arm, block, settings) | {"PYTHONPATH": path},
        name=name,
    )


class KilledServer(Server):
    """Server that is stopped by SIGKILL at once, because SGLang takes seconds to exit after SIGTERM."""

    ENDED_BY = (Server.ENDED_BY[0], Server.ENDED_BY[-1])


def layers_path(folder: Path, inherited: str) -> str:
    """Make a folder with the plugin `shared_layers` and its metadata; return a PYTHONPATH that begins with it."""
    write_metadata(folder, "shared-layers", "0", {"sglang.srt.plugins": {"shared_layers": "shared_layers:register"}})
    link = folder / "shared_layers.py"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(shared_layers.__file__))
    return f"{folder}:{inherited}" if inherited else str(folder)


class Start(NamedTuple):
    """Result of a server's start."""

    seconds: float
    stages: dict[str, float]  # stage of the start -> seconds until it was first seen
    error: str = ""


def bring_up(waves: Sequence[Sequence[Server]], clock: Clock, limit_s: float) -> dict[str, Start]:
    """Start servers and wait until each is ready, has failed, or the time is up. Stop those that are not ready.

    A wave starts when the first server of the wave before compiles its kernels, and at the latest after `NEXT_WAVE_S`.

    Returns:
        The results by the server's name.
    """
    deadline = time.monotonic() + clock.within(limit_s)
    waiting, pending, began = list(waves), dict[str, Server](), dict[str, float]()
    seen, done, first = dict[str, dict[str, float]](), dict[str, Start](), None
    while waiting or pending:
        may_start = first is None or first.name in done or time.monotonic() > began[first.name] + NEXT_WAVE_S
        if waiting and (may_start or CAPTURES in first.log_text()):
            wave = waiting.pop(0)
            first = wave[0]
            for server in wave:
                began[server.name], seen[server.name] = time.monotonic(), {}
                if error := start(server):
                    done[server.name] = Start(0.0, {}, error)
                else:
                    pending[server.name] = server
        for name, server in list(pending.items()):
            passed = time.monotonic() - began[name]
            seen[name].setdefault(server.stage(), round(passed, 1))
            if result := attempt(server, time.monotonic() > deadline):
                del pending[name]
                done[name] = Start(round(passed, 1), seen[name], "" if result == "ready" else result)
        if time.monotonic() > deadline:
            left = [server.name for wave in waiting for server in wave]
            done |= {name: Start(0.0, {}, "not started: the time was up") for name in left}
            waiting = []
        time.sleep(0.3)
    for wave in waves:
        stop([server for server in wave if done[server.name].error])
    return done


def start(server: Server) -> str:
    """Start a server; return the error, or ""."""
    try:
        server.start()
    except ServerError as error:
        return str(error)
    return ""


def attempt(server: Server, is_late: bool) -> str:
    """Return "ready", an error, or "" while the server starts."""
    try:
        if server.is_ready():
            return "ready"
    except ServerError as error:
        return str(error)
    return f"not ready in time; the end of its log:\n{server.log_tail()}" if is_late else ""


def end_on_first_sigterm() -> None:
    """Let the first SIGTERM raise SystemExit, and ignore later ones, which would interrupt the stop of all servers.

    `timeout` sends two: one to its child, and one to the child's group.
    """

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def stop(servers: Sequence[Server]) -> None:
    """Stop servers at the same time. An error of one does not leave the others running."""
    if not servers:
        return

    def end(server: Server) -> None:
        try:
            server.stop()
        except ServerError as error:
            print(error, file=sys.stderr, flush=True)

    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(end, servers))


def describe(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in settings._asdict().items() if name not in ("flags", "env")}
