"""Random requests, valid and harmful, for each front end of SGLang, and a gRPC server for tests.

Front ends are the HTTP APIs of SGLang's Python server, those of its Rust server, and gRPC. Fields are drawn as in
`fuzz.py`. Every request must get an answer or an error status, and the server must go on.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import grpc
import httpx
from hypothesis import strategies as st
from smg_grpc_proto import sglang_scheduler_pb2 as messages
from smg_grpc_proto import sglang_scheduler_pb2_grpc
from smg_grpc_proto.generated.common_pb2 import FlushCacheRequest

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny import pairs as tiny
from tests.server.lib.bad_requests import KINDS, TOO_MANY, Bad
from tests.server.lib.fuzz import (
    GRAMMARS,
    MAX_NEW_TOKENS,
    SAMPLING,
    STOPS,
    TIMEOUT_S,
    generate,
    mapping,
    odd,
    one_in,
    openai,
    short,
    temperature,
    token,
    words,
)

ANSWERED, REFUSED = "answered", "refused"
BREAKS_OFF = ("/api/chat", "/api/generate")  # SGLang's Ollama API ends refused streams without an error event
MODEL = str(tiny.HYBRID.target)  # /v1/responses refuses other names
ERROR = re.compile(r'"error": ?[{"]')  # in the last event of a stream
Send = Callable[[Server, Any], str]
# One client, because a client per request takes 30 ms of CPU. No connection is used twice, because the server may be
# about to close it.
CLIENT = httpx.Client(timeout=TIMEOUT_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


# -- HTTP ----------------------------------------------------------------------------------------------------------


def over_http(server: Server, bad: Bad) -> str:
    """Send a request, read the whole answer, and return `ANSWERED` or `REFUSED`. A stream may end in an error event.

    Raises:
        httpx.TransportError: the server closed the connection, or gave no answer in time.
    """
    try:
        with CLIENT.stream("POST", f"{server.url}{bad.path}", **bad.content) as reply:
            text = reply.read().decode()
    except httpx.RemoteProtocolError:
        if bad.path not in BREAKS_OFF:
            raise
        return REFUSED
    assert text
    return ANSWERED if reply.status_code == 200 and not ERROR.search(text) else REFUSED


@st.composite
def of_api(draw: st.DrawFn, path: str, required: dict[str, Any], optional: dict[str, Any]) -> Bad:
    """Draw a request. In one of three, a value of `ODD` or of `EXTREME` replaces a field's value."""
    body = draw(mapping(required, optional))
    if one_in(draw, 3):
        name = draw(st.sampled_from(sorted(body)))
        body[name] = draw(st.one_of(odd, st.just(EXTREME.get(name, 2**31))))
    body["stream"] = draw(st.booleans())
    return Bad(path, body)


EXTREME = {"top_k": 2**31, "temperature": 1e308, "stop_token_ids": [999999], "logit_bias": {"5": 1e308}}
DRAWN = {name: SAMPLING[name] for name in ("top_k", "top_p")} | {"temperature": temperature}
length = st.integers(1, MAX_NEW_TOKENS)
said = st.lists(words.map(lambda text: {"role": "user", "content": text}), min_size=1, max_size=2)
stops = st.lists(st.sampled_from(STOPS), max_size=4)
OLLAMA = DRAWN | {"num_predict": length, "stop": stops, "seed": st.integers(0, 2**40), "min_p": SAMPLING["min_p"]}
options = st.fixed_dictionaries({}, optional=OLLAMA)
odd_options = st.dictionaries(st.sampled_from(sorted(OLLAMA)), odd, max_size=2) | st.just({"top_k": 2**31})


def as_bad(request: Any) -> Bad:
    return Bad(request.path, request.body)


def known(*paths: str) -> st.SearchStrategy[Bad]:
    """Draw one of the fixed requests to `paths`, except for those that ask for more answers than fit into memory."""
    return st.sampled_from([bad for kind, bad in KINDS.items() if bad.path in paths and kind not in TOO_MANY])


def of_openai(path: str) -> st.SearchStrategy[Bad]:
    drawn = openai().filter(lambda request: request.path == path).map(as_bad)
    sampling = DRAWN | {"max_tokens": length, "stop": stops, "logit_bias": SAMPLING["logit_bias"]}
    prompt = {"messages": said} if path.endswith("chat/completions") else {"prompt": words}
    return st.one_of(
        drawn, known(path), of_api(path, prompt, sampling | {"stop_token_ids": SAMPLING["stop_token_ids"]})
    )


NATIVE = st.one_of(generate().map(as_bad), generate().map(as_bad), known("/generate"))
HTTP = {
    "generate": NATIVE,
    "chat": of_openai("/v1/chat/completions"),
    "completions": of_openai("/v1/completions"),
    "anthropic": of_api(
        "/v1/messages", {"messages": said, "max_tokens": length, "model": st.just("tiny")},
        DRAWN | {"stop_sequences": stops, "system": words},
    ),
    "ollama-chat": of_api(
        "/api/chat", {"messages": said, "model": st.just("tiny"), "options": options | odd_options}, {}
    ),
    "ollama-generate": of_api(
        "/api/generate", {"prompt": words, "model": st.just("tiny"), "options": options | odd_options},
        {"system": words},
    ),
    "responses": of_api(
        "/v1/responses", {"input": words | said, "model": st.just(MODEL), "max_output_tokens": length},
        DRAWN | {"store": st.just(False), "stop": stops, "frequency_penalty": SAMPLING["frequency_penalty"]},
    ),
}  # fmt: skip
RUST = {name: HTTP[name] for name in ("generate", "chat", "completions")}


# -- gRPC ----------------------------------------------------------------------------------------------------------

numbers = st.sampled_from([-1.0, 5.0, 1e-38, 1e35, float("inf"), float("nan")])
odd_ids = st.lists(st.sampled_from([5, 1023, 1024, 2**31, 2**32 - 1]), max_size=4)
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
BOOLEANS = ("ignore_eos", "no_stop_trim", "skip_special_tokens")
GRPC_SAMPLING: dict[str, Any] = {
    "temperature": temperature,
    **{name: SAMPLING[name] for name in ("top_k", "top_p", "min_p", "min_new_tokens", *PENALTIES, *BOOLEANS)},
    "stop": stops,
    "stop_token_ids": st.lists(token, max_size=4),
    "n": st.integers(0, 3),  # more are created by the gRPC front end itself, before the scheduler gets a request
    "stream_interval": st.sampled_from([-5, 0, 1, 4]),
    "logit_bias": SAMPLING["logit_bias"],
}
ODD_SAMPLING = {
    **dict.fromkeys(("temperature", "top_p", "min_p", *PENALTIES), numbers),
    "top_k": st.sampled_from([-7, 0]),
    "min_new_tokens": st.just(2**32 - 1),
    "stop_token_ids": odd_ids,
    "logit_bias": st.dictionaries(st.sampled_from(["5", "1024", "-1", "x"]), numbers, max_size=2),
    "regex": st.just("(["),
    "json_schema": st.just("{"),
}
GRPC_FIELDS: dict[str, Any] = {
    "return_logprob": st.booleans(),
    "logprob_start_len": st.sampled_from([-1, 0]),
    "top_logprobs_num": st.sampled_from([-1, 0, 5, 1024]),
    "token_ids_logprob": st.lists(token, max_size=4),
    "require_reasoning": st.booleans(),
}
ODD_GRPC_FIELDS = {
    "logprob_start_len": st.sampled_from([-(2**31), -2, 100]),
    "top_logprobs_num": st.sampled_from([1025, 2**31 - 1]),
    "token_ids_logprob": odd_ids,
    "return_hidden_states": st.just(True),
    "custom_logit_processor": st.just("garbage"),
    "lora_id": st.just("none-such"),
    "input_embeds": st.lists(st.just(0.5), max_size=3),
    "data_parallel_rank": st.integers(-1, 1),
}


@st.composite
def few(draw: st.DrawFn, usual: dict[str, Any], odd_ones: dict[str, Any]) -> dict[str, Any]:
    """Draw up to 3 usual fields, and in one of four draws an odd one."""
    drawn = {name: draw(usual[name]) for name in draw(st.lists(st.sampled_from(sorted(usual)), max_size=3))}
    if one_in(draw, 4):
        name = draw(st.sampled_from(sorted(odd_ones)))
        drawn[name] = draw(odd_ones[name])
    return drawn


@st.composite
def over_proto(draw: st.DrawFn) -> messages.GenerateRequest | messages.EmbedRequest:
    """Draw a gRPC request for an answer, or in one of 16 draws for an embedding."""
    prompt = messages.TokenizedInput(original_text="", input_ids=draw(odd_ids if one_in(draw, 6) else short))
    asked = {"max_new_tokens": draw(length), "top_k": -1} | draw(few(GRPC_SAMPLING, ODD_SAMPLING))
    if one_in(draw, 5) and not {"regex", "json_schema"} & set(asked):
        kind = draw(st.sampled_from(["regex", "json_schema", "structural_tag"]))
        asked[kind] = draw(st.sampled_from(GRAMMARS[kind]))
    sampling = messages.SamplingParams(**asked)
    if one_in(draw, 16):
        return messages.EmbedRequest(tokenized=prompt, sampling_params=sampling)
    fields = draw(few(GRPC_FIELDS, ODD_GRPC_FIELDS))
    return messages.GenerateRequest(tokenized=prompt, sampling_params=sampling, stream=draw(st.booleans()), **fields)


MOST_AGE_S = 3.0  # an idle scheduler publishes its load at once


class GrpcServer(Server):
    """SGLang's server with `--smg-grpc-mode`, which has no HTTP port for requests."""

    n_sent = 0

    @cached_property
    def stub(self) -> sglang_scheduler_pb2_grpc.SglangSchedulerStub:
        return sglang_scheduler_pb2_grpc.SglangSchedulerStub(grpc.insecure_channel(f"127.0.0.1:{self.port}"))

    def is_ready(self) -> bool:
        if not self.running:
            raise self._error("the server ended before it was ready")
        try:
            return self.stub.HealthCheck(messages.HealthCheckRequest(), timeout=30).healthy
        except grpc.RpcError:
            return False

    def ask(self, request: messages.GenerateRequest | messages.EmbedRequest) -> list[Any]:
        """Send a request and return all responses. Raises grpc.RpcError: the server refuses."""
        self.n_sent += 1
        request.request_id = f"{id(request)}-{self.n_sent}"
        if isinstance(request, messages.EmbedRequest):
            return [self.stub.Embed(request, timeout=TIMEOUT_S)]
        return list(self.stub.Generate(request, timeout=TIMEOUT_S))

    def generate(self, prompt: Sequence[int] | str, *, fields: Any = None, **sampling: Any) -> Generation:
        assert not isinstance(prompt, str)
        request = messages.GenerateRequest(
            tokenized=messages.TokenizedInput(original_text="", input_ids=prompt),
            sampling_params=messages.SamplingParams(**{"top_k": 1} | sampling),
        )
        return Generation(list(self.ask(request)[-1].complete.output_ids), "", {})

    def flush_cache(self) -> None:
        assert self.stub.FlushCache(FlushCacheRequest(), timeout=TIMEOUT_S).success

    def load(self) -> dict[str, Any]:
        """Return the scheduler's load. Its age is not known, so `timestamp` is that of a load of the greatest age."""
        now = time.time()
        (load,) = self.stub.GetLoads(messages.GetLoadsRequest(), timeout=TIMEOUT_S).loads
        names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        return {name: getattr(load, name) for name in names} | {"timestamp": now - MOST_AGE_S}


NO_ANSWER = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN}


def over_grpc(server: Server, request: Any) -> str:
    """Send a request and return `ANSWERED` or `REFUSED`.

    Raises:
        grpc.RpcError: the server gave no answer in time, or ended.
    """
    assert isinstance(server, GrpcServer)
    try:
        server.ask(request)
    except grpc.RpcError as error:
        if error.code() in NO_ANSWER:
            raise
        return REFUSED
    return ANSWERED


# -- sending -------------------------------------------------------------------------------------------------------


def send_all(server: Server, send: Send, sent: Sequence[Any]) -> Counter[str]:
    """Send requests at once, and return the numbers of answers and refusals.

    Raises:
        AssertionError: a request got neither; the message has all requests that were sent with it.
    """
    with ThreadPoolExecutor(len(sent)) as pool:
        futures = [pool.submit(send, server, request) for request in sent]
    lost = [future.exception() for future in futures if future.exception()]
    shown = "\n".join(json.dumps(one, default=str) for one in sent)
    assert not lost, f"{lost[0]!r}: {shown}\n{server.log_tail()}"
    return Counter(future.result() for future in futures)
