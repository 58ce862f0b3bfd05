"""SGLang server as a child process: start, wait until ready, send requests, and stop all its processes.

Benchmarks, demo, `prove` and tests use `Server`. The caller's command selects model and flags.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import httpx
import psutil

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import HOST, port_is_free

if TYPE_CHECKING:
    from openai import OpenAI

GRACE_S = 20.0  # seconds until a signal must have ended the group; SGLang ends within about five seconds of SIGTERM
PORT_S = 5.0  # seconds until an ended server's port must be free; a killed process may still hold it for a moment
REQUEST_TIMEOUT_S = 300.0  # a step of a tiny model takes milliseconds, so minutes mean that the server hangs
START_TIMEOUT_S = 1200.0  # seconds, only against hangs: a start takes about a minute, and a death is noticed earlier
# The server closes connections that are idle for 5 s. A request on a connection that closes at that moment would fail.
LIMITS = httpx.Limits(keepalive_expiry=2.0)

# Stages of a starting server: (text in its log, number of occurrences, stage), in order. If a later SGLang changes a
# line, the display lags by one stage.
_MARKS = (
    ("server_args=", 1, "starting scheduler and detokenizer"),
    ("Init parallel begin", 1, "setting up the device"),
    ("Load weight begin", 1, "loading the target"),
    ("Load weight begin", 2, "loading the draft"),
    ("KV Cache is allocated", 1, "allocating KV and recurrent state"),
    ("CUDA graph begin", 1, "capturing CUDA graphs"),
    ("Application startup complete", 1, "warming up"),
    ("fired up and ready to roll", 1, "ready"),
)


def stage_of(log: str) -> str:
    """Return the last stage whose text is in `log`."""
    reached = [stage for mark, count, stage in _MARKS if log.count(mark) >= count]
    return reached[-1] if reached else "importing SGLang"


class Generation(NamedTuple):
    """Answer to one request."""

    token_ids: list[int]
    text: str
    meta: dict[str, Any]  # SGLang's meta_info: counts, finish reason, speculative counters


def end_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that `with Server(...)` stops its process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Process(Protocol):
    """Part of `subprocess.Popen` that `Server` uses."""

    returncode: Any

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


class Server:
    """Server process with its port and log. Use it as a context manager, or call `start`, `wait_ready` and `stop`.

    The process leads a process group. `stop` ends the whole group, so also processes that the server has started.
    """

    ENDED_BY = (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL)

    def __init__(self, command: Sequence[str], *, port: int, log: Path, env: Mapping[str, str], name: str) -> None:
        """Store the command; `start` runs it.

        Args:
            command: the whole command line except `--host` and `--port`.
            log: receives stdout and stderr; overwritten.
            env: variables added to this process's own.
            name: shown in messages ("speculation off").
        """
        self.name, self.port, self.log, self.env = name, port, log, dict(env)
        self.command = [*command, "--host", HOST, "--port", str(port)]
        self.url = f"http://{HOST}:{port}"
        self._process: Process | None = None
        self._http = httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=LIMITS)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.stop)
            self.start()
            self.wait_ready()
            stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # ---------------------------------------------------------------------------------------------- the process

    def start(self) -> None:
        """Spawn the process and return without waiting for the server.

        Raises:
            ServerError: the port is taken.
        """
        if not port_is_free(self.port):
            raise ServerError(
                f"port {self.port} is taken or not permitted; stop what listens there, or choose another with --port"
            )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = self._spawn(log)

    def _spawn(self, log: IO[bytes]) -> Process:
        return subprocess.Popen(
            self.command,
            env=os.environ | self.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Return the id of the process, which is also the id of its group."""
        assert self._process is not None, f"{self.name}: not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Return the live processes of the group, without zombies."""
        found = []
        for process in psutil.process_iter(["status"]):
            try:
                same_group = os.getpgid(process.pid) == self.pid
            except ProcessLookupError:
                continue
            if same_group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def stage(self) -> str:
        """Return the stage of the server's start."""
        return stage_of(self.log_text())

    def is_ready(self) -> bool:
        """Return whether the server answers.

        Raises:
            ServerError: the process has ended.
        """
        if not self.running:
            assert self._process is not None, f"{self.name}: not started"
            raise self._error(f"the server ended with status {self._process.returncode} before it was ready")
        try:
            return self._http.get("/health", timeout=30).status_code == 200
        except httpx.TransportError:  # nothing listens yet
            return False

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Block until the server answers; `progress.wait_ready` does the same with a display.

        Raises:
            ServerError: the process ended, or the time is up.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise self.not_ready(timeout_s)
            time.sleep(0.5)

    def pause(self) -> None:
        """Suspend the whole group (SIGSTOP), so that the server cannot disturb a measurement."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the whole group: SIGTERM, a grace period, SIGKILL. Does nothing if no process is started.

        Raises:
            ServerError: the port is still taken afterwards.
        """
        if self._process is None:
            return
        for sign in self.ENDED_BY:
            if not self.processes():
                break
            os.killpg(self.pid, sign)
            if sign != signal.SIGCONT:  # SIGCONT only lets a paused process handle SIGTERM
                self._wait_gone(GRACE_S)
        self._process.wait()
        self._process = None
        deadline = time.monotonic() + PORT_S
        while not port_is_free(self.port) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not port_is_free(self.port):
            raise ServerError(
                f"{self.name}: stopped, but something else listens on port {self.port}; stop that process"
            )

    def _wait_gone(self, timeout_s: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._process.poll()  # reaps the leader
            if not self.processes():
                return
            time.sleep(0.1)

    # -------------------------------------------------------------------------------------------------- the log

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self) -> str:
        """Return the last 25 lines of the log."""
        return "\n".join(self.log_text().splitlines()[-25:])

    def not_ready(self, seconds: float) -> ServerError:
        return self._error(f"not ready after {seconds:.0f} s")

    def _error(self, what: str) -> ServerError:
        return ServerError(f"{self.name}: {what}; the end of {self.log}:\n{self.log_tail()}")

    # ------------------------------------------------------------------------------------------------- requests

    def generate(
        self, prompt: Sequence[int] | str, *, fields: Mapping[str, Any] | None = None, **sampling: Any
    ) -> Generation:
        """Return one completion through `/generate`, greedy by default.

        Args:
            prompt: token ids, or text that the server tokenizes.
            fields: further fields of the request (`{"return_logprob": True}`).
            sampling: SGLang's sampling parameters (`max_new_tokens=32`, `temperature=0.7`, ...).

        Raises:
            ServerError: the server rejected the request, or died.
        """
        content = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        request = content | {"sampling_params": {"temperature": 0.0} | sampling} | dict(fields or {})
        body = self._answer("POST", "/generate", request).json()
        return Generation(body["output_ids"], body["text"], body["meta_info"])

    def generate_many(
        self, prompts: Sequence[Sequence[int] | str], *, concurrency: int, **options: Any
    ) -> list[Generation]:
        """Return completions of all prompts in their order, with at most `concurrency` in flight.

        `options` are arguments of `generate`, and its errors are raised.
        """
        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **options), prompts))

    def flush_cache(self) -> None:
        """Empty the prefix cache, after a wait of at most 30 s for the end of all requests.

        Raises:
            ServerError: the server is still busy, refuses, or does not answer.
        """
        self._answer("POST", "/flush_cache?timeout=30", {})

    def server_info(self) -> dict[str, Any]:
        """Return the resolved server arguments, and the scheduler's state under `internal_states`."""
        return self._answer("GET", "/server_info").json()

    def load(self) -> dict[str, Any]:
        """Return the scheduler's load: running and waiting requests, KV slots in use."""
        return self._answer("GET", "/v1/loads").json()["loads"][0]

    def openai(self) -> "OpenAI":
        """Return a client of the OpenAI API; it needs no key."""
        import openai  # takes a second to import

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)

    def _answer(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise self._error(f"{path} failed: {error}") from error
        if response.status_code != 200:
            raise ServerError(f"{self.name}: {path} answered {response.status_code}: {response.text[:500]}")
        return response
