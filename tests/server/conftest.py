"""Real servers for tests: started on first use, shared by all tests, checked for leaks after each module.

    def test_same_tokens(server, questions, reference):
        off, ours = server("off"), server()  # also server("stock"), server(target="dense", flags=["--page-size", "16"])
        prompts = questions(8)
        answers = ours.generate_many(prompts, concurrency=8, max_new_tokens=64)
        assert [a.token_ids for a in answers] == [reference(p, 64) for p in prompts]

A server is forked from a process that has imported SGLang, and starts in 4 to 12 s on two cores. Each test process
keeps up to four servers, or three if memory is short; the least recently used is stopped first. So tests that share a
server should be in one module. All servers run with SGLang's strict memory check: the scheduler ends if a KV slot is
neither free, cached nor in use.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil
import pytest

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.corpus import draw
from sglang_dflash.pairs.tiny.pairs import Arm, Pair
from tests.server.lib.forked import make_server
from tests.server.lib.talk import chat
from tests.server.lib.variants import VARIANTS
from tests.tools import parameters

FIRST_PORT = 31300
# Servers kept per test process: at most 4, and 3 even if memory is short, because a test may use three arms
# ("off", "stock", "plugin").
MAX_LIVE, MIN_LIVE = 4, 3
# Bytes that must be available to start a fourth server. A server with two ranks takes 3 GiB, and two test processes may
# start one each.
ROOM = 6 * 2**30
# Defaults of the plugin's servers: whole blocks without n-gram copies, so that steps can be compared with the
# PyTorch reference.
WHOLE_BLOCKS = {"SGLANG_DFLASH_WIDTHS": "fixed", "SGLANG_DFLASH_COPY": "off"}
AS_USERS = {"SGLANG_DFLASH_WIDTHS": "auto", "SGLANG_DFLASH_COPY": "auto"}
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
PAIRS = {"hybrid": tiny.HYBRID, "dense": tiny.DENSE}
SECOND = {"hybrid": tiny.HYBRID_2, "dense": tiny.DENSE_2}
KIND_FLAGS = {"hybrid": tiny.HYBRID_FLAGS, "dense": ()}

GetServer = Callable[..., Server]


class Key(NamedTuple):
    arm: Arm
    target: str
    pair: Pair
    flags: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    typed: bool = False  # the server is started by its command line, not forked

    def __str__(self) -> str:
        return " ".join([self.arm, self.target, *self.flags, *("=".join(pair) for pair in self.env)])


class ServerPool:
    """Running servers by key, least recently used first."""

    def __init__(self, logs: Path, log_line: Callable[[str], None]) -> None:
        self.logs, self.log_line = logs, log_line
        self.live: dict[Key, Server] = {}

    def get(
        self,
        arm: str = "plugin",
        *,
        target: str = "hybrid",
        pair: Pair | None = None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        typed: bool = False,
    ) -> Server:
        """Return a running server with an empty prefix cache.

        Args:
            arm: "off" (no speculation, with `tests.tools.parameters.REFERENCE_FLAGS`), "stock" (SGLang's own worker) or
                "plugin".
            target: "hybrid" or "dense", or a name for `pair`.
            pair: a target and draft other than the tiny ones.
            flags: further server arguments; they override equal flags of `tiny.FLAGS`.
            env: further environment variables.
            typed: start the server by its command line, as users do, instead of forking.
        """
        env = dict(env or {})
        if arm == Arm.PLUGIN:
            env = WHOLE_BLOCKS | env
        if arm == Arm.OFF:
            flags = [*parameters.REFERENCE_FLAGS, *flags]
            env |= parameters.REFERENCE_ENV
        key = Key(Arm(arm), target, pair or PAIRS[target], tuple(flags), tuple(sorted(env.items())), typed)
        server = self.live.pop(key, None) or self._start(key)
        self.live[key] = server  # most recently used: last
        server.flush_cache()
        return server

    def check(self) -> None:
        """Require every live server to be idle without lost slots.

        A server that fails is stopped, so that later tests get a new one.
        """
        lost = {}
        for key, server in tuple(self.live.items()):
            try:
                require_nothing_lost(server)
            except (ServerError, AssertionError) as error:
                lost[str(key)] = str(error)
                self._drop(key)
        assert not lost, lost

    def drop(self, server: Server) -> None:
        """Check and stop a server that no other test will use."""
        if server in self.live.values():
            require_nothing_lost(server)
        self.forget(server)

    def forget(self, server: Server) -> None:
        """Stop a server without checking it, because a test has broken or killed it."""
        for key in [key for key, one in self.live.items() if one is server]:
            self._drop(key)

    def stop_all(self) -> None:
        with ThreadPoolExecutor() as threads:
            list(threads.map(self._drop, tuple(self.live)))

    def _start(self, key: Key) -> Server:
        while len(self.live) >= MAX_LIVE or (len(self.live) >= MIN_LIVE and psutil.virtual_memory().available < ROOM):
            self._drop(next(iter(self.live)))
        server = (Server if key.typed else make_server)(
            tiny.command(key.arm, key.pair, *tiny.FLAGS, *KIND_FLAGS.get(key.target, ()), *key.flags),
            port=free_port(FIRST_PORT),
            log=self.logs / f"{key.arm}-{key.target}-{abs(hash(key)):x}.log",
            env=tiny.ENV | STRICT | tiny.environment(key.arm) | dict(key.env),
            name=str(key),
        )
        self.log_line(f"starting server: {key}")
        began = time.monotonic()
        server.start()
        try:
            server.wait_ready()
            tiny.require_worker(key.arm, server)
        except BaseException:
            server.stop()
            raise
        self.log_line(f"ready after {time.monotonic() - began:.0f} s; log: {server.log}")
        return server

    def _drop(self, key: Key) -> None:
        self.live.pop(key).stop()


def wait_idle(server: Server, timeout_s: float = 60.0) -> dict[str, Any]:
    """Wait until the scheduler is idle, has passed its idle check and has written its metrics. Return its load.

    When idle, SGLang's scheduler compares its free, cached and locked slots (KV, recurrent states, requests) with the
    pool sizes, and raises if one is missing. It publishes its load after this check and after its metrics. SGLang
    also publishes a load before it processes the outcome of a step. After an answer at most one step is in flight, so
    the second idle load is one after the check.

    Raises:
        ServerError: the server is dead or not idle after `timeout_s`.
    """
    seen, deadline = time.time(), time.monotonic() + timeout_s
    load: dict[str, Any] = {"timestamp": 0.0}
    for _ in range(2):
        while load["timestamp"] <= seen or load["num_running_reqs"] or load["num_waiting_reqs"]:
            if not server.running or time.monotonic() > deadline:
                raise ServerError(f"{server.name}: not idle after {timeout_s:.0f} s ({load}):\n{server.log_tail()}")
            time.sleep(0.1)
            load = server.load()
        seen = load["timestamp"]
    return load


def require_nothing_lost(server: Server, timeout_s: float = 60.0) -> None:
    """Wait until the scheduler is idle, see `wait_idle`, and require no KV slot in use or locked.

    Raises:
        ServerError: the server is dead or not idle after `timeout_s`.
        AssertionError: a KV slot is still in use.
    """
    server.generate([5], max_new_tokens=1)
    load = wait_idle(server, timeout_s)
    assert load["num_used_tokens"] == 0, f"{server.name} holds KV slots while idle: {load}"


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    assert capture is not None

    def log_line(line: str) -> None:
        with capture.global_and_fixture_disabled():  # prints despite pytest's capture, because a start takes long
            print(f"\n  {line}", flush=True)

    pool = ServerPool(tmp_path_factory.mktemp("servers"), log_line)
    try:
        yield pool
    finally:
        pool.stop_all()


@pytest.fixture(scope="session")
def server(pool: ServerPool) -> GetServer:
    """Return `ServerPool.get`, as in `server(arm="plugin", target="hybrid", flags=[...], env={...})`."""
    return pool.get


# Function scope, not module scope: the pool may stop a server between two tests, and then starts it again.
@pytest.fixture
def ours(server: Callable) -> Server:
    """Return a server with the defaults of users: it chooses widths, and whether to use n-gram copies."""
    return server(flags=VARIANTS["hybrid"].flags, env=AS_USERS)


@pytest.fixture
def whole(server: Callable) -> Server:
    """Return a server that verifies whole blocks without copies. Its steps equal those of the PyTorch reference."""
    return server(flags=VARIANTS["hybrid"].flags)


@pytest.fixture
def off(server: Callable) -> Server:
    return server("off")


@pytest.fixture(scope="module", autouse=True)
def nothing_lost(pool: ServerPool) -> Iterator[None]:
    """Require after each module that no running server has lost or still holds a slot."""
    yield
    pool.check()


@pytest.fixture(scope="session")
def questions() -> Callable[..., list[list[int]]]:
    """Return `questions(n, target="hybrid", seed=0)`, which returns `n` held-out chat prompts as token ids."""

    def prompts(n: int, target: str = "hybrid", seed: int = 0) -> list[list[int]]:
        random = Random(seed)
        return [chat(draw(random, held_out=True).prompt, target) for _ in range(n)]

    return prompts


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[int]]:
    """Return `reference(prompt, max_new_tokens, target="hybrid")`: greedy answer of Transformers' `generate` in fp32.

    The answer ends with the end token, as SGLang's `output_ids` do, or at `max_new_tokens`.
    """
    from tests.server.lib.oracle import oracle

    @cache
    def generate(prompt: tuple[int, ...], max_new_tokens: int, target: str) -> tuple[int, ...]:
        return tuple(oracle(PAIRS[target], None, None).continuation(prompt, max_new_tokens))

    def answer(prompt: Sequence[int], max_new_tokens: int, target: str = "hybrid") -> list[int]:
        return list(generate(tuple(prompt), max_new_tokens, target))

    return answer


@pytest.fixture(scope="session")
def plain_torch(questions: Callable, reference: Callable) -> Callable[..., Any]:
    """Return `plain_torch(n, max_new_tokens, target="hybrid", draft_window=None)`: `Expected` for `n` questions."""
    from tests.server.lib.oracle import Expected, oracle

    def expect(n: int, max_new_tokens: int, target: str = "hybrid", draft_window: int | None = None) -> Expected:
        prompts, expert = questions(n, target), oracle(PAIRS[target], None, draft_window)
        token_ids = [reference(prompt, max_new_tokens, target) for prompt in prompts]
        steps = [expert.accepted_histogram(prompt, max_new_tokens) for prompt in prompts]
        return Expected(prompts, max_new_tokens, token_ids, steps)

    return expect
