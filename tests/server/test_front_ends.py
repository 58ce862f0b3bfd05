"""Requests through every front end of SGLang: none ends the server, and each gets an answer or an error status."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.tools.check import served
from tests.server.conftest import AS_USERS, FIRST_PORT, STRICT, require_nothing_lost
from tests.server.lib.bad_requests import GREEDY, MESSAGES, PROMPT
from tests.server.lib.front_ends import (
    ANSWERED,
    HTTP,
    REFUSED,
    RUST,
    GrpcServer,
    messages,
    over_grpc,
    over_http,
    over_proto,
    send_all,
)
from tests.server.lib.variants import VARIANTS
from tests.server.test_fuzz import SETTINGS

pytestmark = pytest.mark.full
N_REQUESTS = 500  # per front end
MAX_NEW_TOKENS = 32
RUST_SERVER = {"SGLANG_RUST_SERVER": "1"}
TOP_K = {"top_k": 2**31, "temperature": 1}
SENTENCE = "top_k is 2147483648; send at most 2147483647"


@pytest.fixture
def rust(server: Callable) -> Server:
    return server(flags=VARIANTS["hybrid"].flags, env=AS_USERS | RUST_SERVER)


@pytest.fixture(scope="module")
def grpc_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    flags = (*tiny.FLAGS, *tiny.HYBRID_FLAGS, *VARIANTS["hybrid"].flags)
    started = GrpcServer(
        [*tiny.command(tiny.Arm.PLUGIN, tiny.HYBRID, *flags), "--smg-grpc-mode"],
        port=free_port(FIRST_PORT),
        log=tmp_path_factory.mktemp("grpc") / "log",
        env=tiny.ENV | STRICT | AS_USERS | tiny.environment(tiny.Arm.PLUGIN),
        name="gRPC",
    )
    with started:
        tiny.require_worker(tiny.Arm.PLUGIN, started)
        yield started


def fuzzed(server: Server, send: Callable, requests: st.SearchStrategy[Any]) -> None:
    """Send requests at random, up to eight at once. Then the server must be idle, with nothing lost."""
    counts = Counter[str]()

    @seed(1)
    @settings(SETTINGS, max_examples=2 * N_REQUESTS)
    @given(st.lists(requests, min_size=1, max_size=8))
    def all_get_an_answer(sent: list[Any]) -> None:
        if counts.total() < N_REQUESTS:
            counts.update(send_all(server, send, sent))
            assert server.running

    all_get_an_answer()
    print(counts)
    assert counts.total() >= N_REQUESTS
    assert min(counts[ANSWERED], counts[REFUSED]) > 0.05 * N_REQUESTS
    require_nothing_lost(server)


def require_right(server: Server, questions: Callable, reference: Callable) -> None:
    for prompt in questions(2, seed=5):
        answer = server.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)
        assert answer.token_ids == reference(prompt, MAX_NEW_TOKENS)


@pytest.mark.parametrize("api", HTTP)
def test_python(ours: Server, api: str, questions: Callable, reference: Callable) -> None:
    fuzzed(ours, over_http, HTTP[api])
    require_right(ours, questions, reference)


@pytest.mark.parametrize("api", RUST)
def test_rust(rust: Server, api: str, questions: Callable, reference: Callable) -> None:
    fuzzed(rust, over_http, RUST[api])
    require_right(rust, questions, reference)


def test_grpc(grpc_server: GrpcServer, questions: Callable, reference: Callable) -> None:
    fuzzed(grpc_server, over_grpc, over_proto())
    require_right(grpc_server, questions, reference)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY | TOP_K}),
        ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES} | TOP_K),
    ],
)
def test_rust_answers_a_refusal_with_status_400(rust: Server, path: str, body: dict[str, Any]) -> None:
    reply = httpx.post(f"{rust.url}{path}", json=body, timeout=60)
    assert reply.status_code == 400
    assert SENTENCE in reply.text
    streamed = httpx.post(f"{rust.url}{path}", json=body | {"stream": True}, timeout=60)
    assert SENTENCE in streamed.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ids", "sampling", "fields", "sentence"),
    [
        ([5, 1024], {}, {}, "input_ids has 1024, which is no token of this model"),
        (PROMPT, {"temperature": 1e35}, {}, "temperature is "),
        (PROMPT, {"logit_bias": {"1024": 1.0}}, {}, "logit_bias must has keys in"),
        (PROMPT, {}, {"lora_id": "none-such"}, "lora_id is none-such, which is no loaded adapter"),
        (PROMPT, {}, {"return_logprob": True, "token_ids_logprob": [5000]}, "token_ids_logprob has 5000"),
    ],
)
def test_grpc_answers_a_refusal_with_invalid_argument(
    grpc_server: GrpcServer,
    ids: list[int],
    sampling: dict[str, Any],
    fields: dict[str, Any],
    sentence: str,
    stream: bool,
) -> None:
    request = messages.GenerateRequest(
        tokenized=messages.TokenizedInput(original_text="", input_ids=ids),
        sampling_params=messages.SamplingParams(**{"top_k": -1, "max_new_tokens": 4} | sampling),
        stream=stream,
        **fields,
    )
    with pytest.raises(grpc.RpcError) as refused:
        grpc_server.ask(request)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in refused.value.details()


def test_check_names_the_rust_server(rust: Server) -> None:
    with pytest.raises(ValueError, match="reports no step times"):
        served.fetch(rust.url)


def test_check_names_a_grpc_port(grpc_server: GrpcServer) -> None:
    with pytest.raises(OSError, match="gRPC"):
        served.fetch(grpc_server.url)
