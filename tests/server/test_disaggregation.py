"""Prefill-decode disaggregation: a prefill and a decode server answer like one server, in as many steps.

The prefill server must send the draft's K/V too. Without them answers would stay right but take more steps. Prompts are
prefilled in chunks. Each is sent several times, so later prefills use the prefix cache.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, NamedTuple

import httpx
import pytest

from sglang_dflash.engine.draft.record import SLIDING
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Generation, Server
from tests.server.conftest import PAIRS
from tests.server.lib.bad_requests import HARMFUL
from tests.server.lib.oracle import Expected, oracle
from tests.server.lib.pairs import pair_of
from tests.server.lib.penalised import ASKED, edited_answer, end_token, penalty_rule
from tests.server.lib.rehearsals import FA3, GRAPHS, SM90
from tests.server.lib.rows import require_logprobs, require_rows
from tests.server.lib.unchecked import UNCHECKED, refusal
from tests.server.lib.variants import TWO_NODES, Variant, window

N_PROMPTS, MAX_NEW_TOKENS = 6, 48
# Seconds, shorter than the defaults, so that a server soon gives up waiting for the other.
PATIENCE = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5",
}

HELD = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")

pytestmark = pytest.mark.full


TWO_RANKS = ("--tp", "2")
NARROW = 24  # tokens of a draft window, less than a prompt has
TIGHT = ("--max-total-tokens", "352", "--num-reserved-decode-tokens", "1")


class Kind(NamedTuple):
    target: str = "hybrid"
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    prefill: tuple[str, ...] = ()  # flags of the prefill server alone
    decode: tuple[str, ...] = ()  # flags of the decode server alone
    slides: bool = False  # the draft window becomes the window of all of the draft's layers


KINDS = {
    "hybrid": Kind(),
    "pages": Kind("dense", ("--page-size", "16")),
    # The decode server's KV pool is so small that it retracts requests.
    "retract": Kind(decode=TIGHT),
    "dense-retract": Kind("dense", decode=(*TIGHT, "--hicache-io-backend", "direct")),
    # One server has two ranks, the other has one. K/V heads are split or joined when they are sent.
    "prefill-two-ranks": Kind(prefill=TWO_RANKS, env=TWO_NODES),
    "decode-two-ranks": Kind("dense", decode=TWO_RANKS, env=TWO_NODES),
    "fa3-graphs": Kind(flags=(*FA3, *GRAPHS), env=SM90),
    "fa3-graphs-window": Kind(flags=(*FA3, *GRAPHS, *window(NARROW)), env=SM90, slides=True),
}
# Kinds for the tests of a killed server and of a lost request, which take 90 s and 20 s. The other kinds differ in
# nothing that these affect.
KILLED = ("hybrid", "decode-two-ranks")
BROKEN = pytest.mark.parametrize("serving", [KINDS[kind] for kind in KILLED], ids=KILLED, indirect=True)


class Two(NamedTuple):
    """A prefill and a decode server; `rooms` yields a `bootstrap_room` per request, an id sent to both."""

    prefill: Server
    decode: Server
    port: int
    rooms: Iterator[int]

    def generate(self, prompt: list[int], *, fields: Mapping[str, Any] | None = None, **sampling: Any) -> Generation:
        """Send the request to both servers, as a router does; return the decode server's answer."""
        met = self.meeting(next(self.rooms)) | dict(fields or {})
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(s.generate, prompt, fields=met, **sampling) for s in (self.prefill, self.decode)]
        return asked[1].result()

    def meeting(self, room: int) -> dict[str, Any]:
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": room}

    def generate_many(self, prompts: list[list[int]], *, concurrency: int, **sampling: Any) -> list[Generation]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **sampling), prompts))


class Serving(NamedTuple):
    two: Two
    kind: Kind
    expected: Expected


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def serving(
    request: pytest.FixtureRequest, pool: Any, plain_torch: Callable[..., Expected], tmp_path_factory: Any
) -> Iterator[Serving]:
    kind: Kind = request.param
    port = free_port(31900)

    def start(mode: str, *flags: str) -> Server:
        meet = ("--disaggregation-mode", mode, "--disaggregation-bootstrap-port", str(port))
        both = ("--enable-return-hidden-states", *kind.flags, *meet)
        return pool.get(target=kind.target, flags=(*both, *flags), env=PATIENCE | dict(kind.env))

    prefill, decode = start("prefill", "--chunked-prefill-size", "64", *kind.prefill), start("decode", *kind.decode)
    two = Two(prefill, decode, port, count(1))
    expected = plain_torch(N_PROMPTS, MAX_NEW_TOKENS, kind.target)
    if kind.slides:
        sliding = Variant(kind.target, draft_layers=(SLIDING, SLIDING), both_ways=True)
        expert, before = oracle(pair_of(sliding, tmp_path_factory.mktemp("sliding"), NARROW), None, None), expected
        steps = [expert.accepted_histogram(prompt, MAX_NEW_TOKENS) for prompt in expected.prompts]
        expected = expected._replace(steps=steps)
        assert expected.steps != before.steps, "the window changes nothing; this row cannot fail"
    yield Serving(two, kind, expected)
    for server in (two.prefill, two.decode):
        pool.forget(server)


@pytest.mark.parametrize("concurrency", [1, 6])
def test_answers_and_steps_are_plain_torchs(serving: Serving, concurrency: int) -> None:
    """With a small KV pool, repeat until a request is retracted. On a slow machine requests may not overlap."""
    rounds = 5 if TIGHT[0] in serving.kind.decode and concurrency > 1 else 1
    for _ in range(rounds):
        answers = serving.expected.require_from(serving.two, concurrency)
        if any(answer.meta["num_retractions"] for answer in answers):
            return
    assert rounds == 1, "memory sufficed; this test cannot fail"


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"regex": "[a-z ]{20}"}], ids=["greedy", "drawn", "regex"]
)
def test_logprobs_and_hidden_states_are_plain_torchs(serving: Serving, sampling: dict[str, Any]) -> None:
    """The prefill server chooses the first token and sends its log-probability, but not its hidden state.

    After a stop inside a block, SGLang truncates the rows of hidden states to the number of output tokens. The first
    token has no row here, so one row too many remains; this test drops it.
    """
    expected, target = serving.expected, PAIRS[serving.kind.target].target
    fields = {"return_logprob": True, "return_hidden_states": True}
    asked = {"fields": fields, "max_new_tokens": MAX_NEW_TOKENS} | sampling
    answers = serving.two.generate_many(expected.prompts, concurrency=3, **asked)
    for prompt, answer in zip(expected.prompts, answers, strict=True):
        if "regex" in sampling:
            assert re.fullmatch(sampling["regex"], answer.text)
        else:
            require_logprobs(target, prompt, answer)
        del answer.meta["hidden_states"][len(answer.token_ids) - 1 :]
        require_rows(target, prompt, answer, n_missing=1)


def test_penalties_are_their_definitions(serving: Serving) -> None:
    """The decode server must count the output of requests that it has not prefilled."""
    prompts, target = serving.expected.prompts, serving.kind.target
    end = end_token(target)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(
            lambda prompt, asked: serving.two.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, **asked).token_ids,
            prompts,
            ASKED,
        )
        for prompt, asked, answer in zip(prompts, ASKED, answers, strict=True):
            assert answer == edited_answer(prompt, penalty_rule(asked, end), target, MAX_NEW_TOKENS), asked


@BROKEN
def test_request_without_its_prefill_fails_alone(serving: Serving) -> None:
    """A request that only the decode server gets must time out. While it waits, other requests must be answered."""
    two, expected = serving.two, serving.expected
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(two.decode.generate, expected.prompts[0], fields=two.meeting(10**6), max_new_tokens=4)
        expected.require_from(two, 3)
        with pytest.raises(ServerError, match="answered 5"):
            lost.result()


def test_nothing_is_held_afterwards(serving: Serving) -> None:
    for server in (serving.two.prefill, serving.two.decode):
        assert server.running
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        require_nothing_held(server)


@BROKEN
@pytest.mark.parametrize("end", ["decode", "prefill"])
def test_killed_server_fails_its_requests_and_rejoins(serving: Serving, end: str) -> None:
    """Kill one of the servers while six requests are in flight on both.

    A seventh request, which only the surviving server got, must fail too.
    """
    two, expected = serving.two, serving.expected
    dies, stays = (two.prefill, two.decode) if end == "prefill" else (two.decode, two.prefill)
    with ThreadPoolExecutor(1 + N_PROMPTS) as pool:
        waits = pool.submit(stays.generate, expected.prompts[0], fields=two.meeting(10**6 + 1), max_new_tokens=4)
        under_way = [pool.submit(two.generate, prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in expected.prompts]
        time.sleep(0.5)
        os.killpg(dies.pid, signal.SIGKILL)
        dies.stop()
        for asked, token_ids in zip(under_way, expected.token_ids, strict=True):
            if not isinstance(asked.exception(), ServerError | httpx.TransportError):
                assert asked.result().token_ids == token_ids
        with pytest.raises(ServerError, match="answered 5"):
            waits.result()
    dies.start()
    dies.wait_ready()
    expected.require_from(two, 3)
    require_nothing_held(stays)


@pytest.mark.parametrize("serving", [Kind(env=tuple(UNCHECKED.items()))], ids=["unchecked"], indirect=True)
def test_both_schedulers_refuse_harmful_requests(serving: Serving) -> None:
    """A router sends a request to both servers. No front end has checked these, so both schedulers must refuse them."""
    two = serving.two
    for name, (bad, sentence) in HARMFUL.items():
        met = two.meeting(next(two.rooms))
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda end, bad=bad, met=met: refusal(end, bad, **met), (two.prefill, two.decode)))
        for status, text in answers:
            assert status == 400, name
            assert re.search(sentence, text), name
    serving.expected.require_from(two, 3)
    require_nothing_held(two.prefill)
    require_nothing_held(two.decode)


def require_nothing_held(server: Server, timeout_s: float = 20.0) -> None:
    """Poll a server's load until it is idle.

    `conftest.require_nothing_lost` needs an answer, which a prefill or a decode server cannot give alone.
    """
    deadline = time.monotonic() + timeout_s
    while (held := [server.load()[name] for name in HELD]) != [0, 0, 0]:
        assert time.monotonic() < deadline, f"{server.name} holds {dict(zip(HELD, held, strict=True))}"
        time.sleep(0.2)
