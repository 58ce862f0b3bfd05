"""Replicas answer like one server: data-parallel ranks (`--dp-size`), and two servers that share SGLang's router."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import pytest

from sglang_dflash.pairs.servers.server import Server
from tests.server.lib.router import end, n_answered, routed
from tests.server.lib.talk import steps, tokens_of
from tests.server.lib.variants import TWO_NODES, VARIANTS

pytestmark = pytest.mark.full
MAX_NEW_TOKENS = 64


# -- ranks of one server -------------------------------------------------------------------------------------------


def test_two_ranks_answer_like_one_in_as_many_steps(
    server: Callable, whole: Server, questions: Callable, reference: Callable
) -> None:
    prompts = questions(10, seed=80)
    expected = [steps(whole.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)) for prompt in prompts]
    two = server(flags=("--dp-size", "2"), env=dict(TWO_NODES))
    answers = two.generate_many(prompts, concurrency=6, max_new_tokens=MAX_NEW_TOKENS)
    assert tokens_of(answers) == [reference(prompt, MAX_NEW_TOKENS) for prompt in prompts]
    assert [steps(answer) for answer in answers] == expected
    states = two.server_info()["internal_states"]
    n_steps = [sum(state["dflash"]["width"]["n_steps"].values()) for state in states]
    assert len(n_steps) == 2
    assert min(n_steps) > 0, "one rank was idle"


# -- two servers and a router --------------------------------------------------------------------------------------


class Fleet(NamedTuple):
    router: Server
    replicas: tuple[Server, Server]


@pytest.fixture(scope="module")
def fleet(server: Callable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = VARIANTS["hybrid"].flags
    replicas = tuple(server(flags=flags, env={"SGLANG_DFLASH_COPY": copy}) for copy in ("off", "auto"))
    with routed(replicas, tmp_path_factory.mktemp("router")) as router:
        yield Fleet(router, replicas)


def test_answers_of_the_router_are_those_of_one_server(fleet: Fleet, questions: Callable, reference: Callable) -> None:
    prompts = questions(16, seed=81)
    before = [n_answered(replica) for replica in fleet.replicas]
    answers = fleet.router.generate_many(prompts, concurrency=8, max_new_tokens=MAX_NEW_TOKENS)
    assert tokens_of(answers) == [reference(prompt, MAX_NEW_TOKENS) for prompt in prompts]
    after = [n_answered(replica) for replica in fleet.replicas]
    assert all(a > b for a, b in zip(after, before, strict=True)), "one replica was idle"


def test_conversation_stays_on_the_server_of_its_prefix(fleet: Fleet, questions: Callable) -> None:
    """The router sends each turn to the server that has the earlier turns in its cache."""
    (history,) = questions(1, seed=82)
    cached = []
    for _ in range(4):
        answer = fleet.router.generate(history, max_new_tokens=MAX_NEW_TOKENS)
        cached.append(answer.meta["cached_tokens"])
        history = [*history, *answer.token_ids, *questions(1, seed=83)[0]]
    assert all(n > 0 for n in cached[1:]), cached


def test_openai_api_streams_through_the_router(fleet: Fleet) -> None:
    client = fleet.router.openai()
    asked = {"messages": [{"role": "user", "content": "Spell the words candle and castle."}], "temperature": 0}
    whole = client.chat.completions.create(model="tiny", max_tokens=40, **asked).choices[0].message.content
    chunks = client.chat.completions.create(model="tiny", max_tokens=40, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def test_killed_replica_loses_no_request(
    fleet: Fleet, questions: Callable, reference: Callable, pool: Callable
) -> None:
    """The router must resend requests of the killed server to the other server."""
    prompts = questions(24, seed=84)
    with ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(fleet.router.generate, prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
        asked[3].result()
        end(fleet.replicas[1])
        answers = [one.result() for one in asked]
    assert tokens_of(answers) == [reference(prompt, MAX_NEW_TOKENS) for prompt in prompts]
    assert httpx.get(f"{fleet.router.url}/health", timeout=30).status_code == 200
    pool.forget(fleet.replicas[1])
    after = [fleet.router.generate(prompt, max_new_tokens=8).token_ids for prompt in prompts[:4]]
    assert after == [reference(prompt, 8) for prompt in prompts[:4]]
