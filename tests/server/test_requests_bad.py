"""Invalid requests: same status and message as without speculation, and the server keeps running."""

import contextlib
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sglang_dflash.pairs.servers.server import Server
from tests.server.lib.bad_requests import (
    GREEDY,
    KINDS,
    NO_LABEL,
    NO_PARAMETER,
    NO_PROMPT,
    NO_TOKEN,
    OUTLIVED,
    PROMPT,
    TOO_MANY,
    Bad,
)
from tests.server.lib.variants import METRICS, VARIANTS

MAX_NEW_TOKENS = 8
# Time of day in the message of a grammar that does not compile; it differs between answers.
CLOCK = re.compile(r"\[\d\d:\d\d:\d\d\]")


def answer_to(server: Server, bad: Bad) -> tuple[int, Any]:
    """Return the status, and the answers (status 200) or the error message."""
    response = httpx.post(f"{server.url}{bad.path}", timeout=60, **bad.content)
    if response.status_code != 200:
        return response.status_code, CLOCK.sub("[now]", response.text)
    body = response.json()
    if bad.path == "/generate":
        answers = body if isinstance(body, list) else [body]
        return 200, [(answer["output_ids"], answer["meta_info"]["finish_reason"]) for answer in answers]
    return 200, [(choice.get("message") or choice["text"], choice["finish_reason"]) for choice in body["choices"]]


@pytest.mark.parametrize("kind", KINDS)
def test_refused_or_served_as_without_speculation(ours: Server, off: Server, kind: str) -> None:
    assert answer_to(ours, KINDS[kind]) == answer_to(off, KINDS[kind])
    alive = ours.generate(PROMPT, max_new_tokens=MAX_NEW_TOKENS).token_ids
    assert alive == off.generate(PROMPT, max_new_tokens=MAX_NEW_TOKENS).token_ids


REFUSALS = {
    **dict.fromkeys(NO_PROMPT, "the prompt has no tokens|Prompt cannot be empty"),  # second message: OpenAI API
    **dict.fromkeys(NO_TOKEN, r"its vocabulary, 0\.\.1023"),
    **dict.fromkeys((*NO_PARAMETER, *TOO_MANY), "; (send|ask for|leave it)"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_fatal_requests_are_refused_by_name(ours: Server, off: Server, kind: str) -> None:
    for server in (ours, off):
        status, text = answer_to(server, KINDS[kind])
        assert status == 400
        assert re.search(REFUSALS[kind], text), text


def test_fatal_labels_are_refused_by_name(ours: Server) -> None:
    status, text = answer_to(ours, NO_LABEL["custom_labels-unknown"])
    assert status == 400
    assert "custom_labels has team, which the metrics of this server do not have" in text
    assert ours.generate(PROMPT, max_new_tokens=MAX_NEW_TOKENS).token_ids


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [kind for kind in (*NO_PROMPT, *NO_TOKEN, *NO_PARAMETER, *NO_LABEL) if kind not in OUTLIVED]
)
def test_without_the_plugin_the_server_ends(server: Callable, pool: Any, kind: str) -> None:
    """These requests crash a server without the plugin, so the plugin's refusals are needed."""
    stock = server("stock", flags=METRICS)
    bad = (KINDS | NO_LABEL)[kind]
    with contextlib.suppress(httpx.TransportError):
        httpx.post(f"{stock.url}{bad.path}", timeout=30, **bad.content)
    ends = time.monotonic() + 120  # after a crash SGLang waits a minute for CUDA's core dump
    while stock.running and time.monotonic() < ends:
        time.sleep(0.2)
    assert not stock.running
    pool.forget(stock)


@pytest.mark.full
def test_several_tokenizer_processes_refuse_too(server: Callable, off: Server) -> None:
    ours = server(
        flags=[*VARIANTS["hybrid"].flags, "--tokenizer-worker-num", "2"],
        env={"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300"},  # on few cores SGLang takes long to import
    )
    for kind in (*NO_PROMPT, *NO_TOKEN, *NO_PARAMETER, *TOO_MANY):
        assert answer_to(ours, KINDS[kind]) == answer_to(off, KINDS[kind])
    answer = ours.generate(PROMPT, max_new_tokens=MAX_NEW_TOKENS)
    assert answer.token_ids == off.generate(PROMPT, max_new_tokens=MAX_NEW_TOKENS).token_ids


def test_turns_of_a_session_are_checked(ours: Server) -> None:
    """Token ids are checked in every turn of a session. Its first turn must have tokens."""

    session = httpx.post(f"{ours.url}/open_session", json={"capacity_of_str_len": 1000}, timeout=60).json()
    for ids, status in (([], 400), ([5, 1024], 400), (PROMPT, 200), ([1024], 400), ([8, 9], 200)):
        body = {"input_ids": ids, "sampling_params": GREEDY, "session_params": {"id": session, "rid": None}}
        assert httpx.post(f"{ours.url}/generate", json=body, timeout=60).status_code == status, ids
    httpx.post(f"{ours.url}/close_session", json={"session_id": session}, timeout=60)
    assert ours.generate(PROMPT, max_new_tokens=MAX_NEW_TOKENS).token_ids


def test_most_of_them_are_refused(off: Server) -> None:
    refused = [kind for kind, bad in KINDS.items() if 400 <= answer_to(off, bad)[0] < 500]
    assert len(refused) >= 50, refused
    assert not [kind for kind, bad in KINDS.items() if answer_to(off, bad)[0] >= 500]


def test_bad_requests_do_not_disturb_good_ones(ours: Server, questions: Callable, reference: Callable) -> None:
    prompts = questions(12, seed=60)
    with ThreadPoolExecutor(1) as nuisance:
        sent = [nuisance.submit(answer_to, ours, bad) for bad in KINDS.values()]
        answers = ours.generate_many(prompts, concurrency=6, max_new_tokens=64)
        assert [answer.token_ids for answer in answers] == [reference(prompt, 64) for prompt in prompts]
        assert all(future.result()[0] in range(200, 500) for future in sent)
