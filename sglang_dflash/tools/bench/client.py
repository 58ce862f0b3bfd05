"""Engine that queries a server with the OpenAI API.

On request SGLang 0.5.23 adds token ids and its speculative counters to an unstreamed answer, and vLLM adds token ids.
Requests use httpx, because the `openai` client would build an object for every chunk while the clock runs.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import httpx

from sglang_dflash.engine.host.names import Name
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.server import LIMITS
from sglang_dflash.tools.bench.engine import Engine, Prompt, Sampling, TokenIds
from sglang_dflash.tools.bench.measure import NAN, Completion, Steps

TIMEOUT_S = 3600.0  # long answers of a full server take minutes; an hour of silence means a hang
PATH = "/v1/chat/completions"
PROTOCOL = "sglang.srt.entrypoints.openai.protocol"
# Names of SGLang's HTTP interface used here; `tests/host` checks them in the installed SGLang.
HTTP_NAMES = (
    Name(PROTOCOL, "ChatCompletionRequest", "chat_template_kwargs ignore_eos input_ids stream_options"),
    Name(PROTOCOL, "ChatCompletionRequest", "return_meta_info return_token_ids"),
    Name(PROTOCOL, "ChatCompletionResponseChoice", "meta_info prompt_token_ids response_token_ids"),
    Name(PROTOCOL, "SpecTokensDetails", "spec_verify_ct spec_num_correct_drafts spec_correct_drafts_histogram"),
)


class ServerKind(StrEnum):
    """Software of a server with the OpenAI API."""

    SGLANG = "sglang"
    VLLM = "vllm"
    OTHER = "openai"


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
UNSTREAMED: Mapping[str, dict[str, Any]] = {
    ServerKind.SGLANG: {"return_meta_info": True, "return_token_ids": True},
    ServerKind.VLLM: {"return_token_ids": True},
    ServerKind.OTHER: {},
}
# Names of vLLM's Prometheus counters, without labels.
STEPS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
REFUSED = (401, 403)  # statuses of a missing or wrong API key
ABOUT = ("version", "speculative_algorithm", "speculative_num_draft_tokens", "attention_backend", "dtype")


class HttpEngine(Engine):
    """Server with the OpenAI API at a URL."""

    def __init__(self, name: str, url: str, *, model: str = "", api_key: str = "none") -> None:
        """Create the client. If `model` is empty, `meet` takes the first model that the server lists."""
        self.name, self.model = name, model
        self.url = url.rstrip("/").removesuffix("/v1")
        self.kind = ServerKind.OTHER
        headers = {"Authorization": f"Bearer {api_key}"}
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False, headers=headers, limits=LIMITS)

    def meet(self, expected: ServerKind | None = None) -> None:
        """Determine the kind of server, and its model.

        Raises:
            ServerError: no server answers, it refuses the key, is not of the `expected` kind, or lacks the model.
        """
        try:
            self.kind = self._whose()
            served = self._models()
        except httpx.TransportError as error:
            what = f"no answer from {self.url} ({error}); start the server, or correct the URL"
            what += " (https needs a certificate of a public authority)" if self.url.startswith("https:") else ""
            raise ServerError(f"{self.name}: {what}") from error
        if expected is not None and self.kind is not expected:
            what = f"{self.url} answers as {self.kind} (by /server_info and /version), not as {expected}"
            raise ServerError(f"{self.name}: {what}; drop --backend, or give another URL")
        self.model = self.model or served[0]
        if self.model not in served:
            raise ServerError(
                f"{self.name}: {self.url} serves {', '.join(served)}, not {self.model}; change or drop --model"
            )

    def flush(self) -> bool:
        if self.kind is ServerKind.SGLANG:
            with self._answering():
                response = self.http.post("/flush_cache?timeout=30")
            if response.status_code in REFUSED:
                what = f"{self.name}: {self.url}/flush_cache answered {response.status_code}"
                raise ServerError(f"{what}; start the server without --admin-api-key")
            if response.status_code == 400:  # after 30 s, or at once if another client empties the cache
                what = f"{self.url} is in use ({response.text.strip()[:200]}); let no other client use it"
                raise ServerError(f"{self.name}: {what}")
            self._checked(response)
        return self.kind is ServerKind.SGLANG

    def ask(self, prompt: Prompt, sampling: Sampling, *, stream: bool) -> Callable[[], Completion]:
        """Send a request and wait for the answer. Returns a function that parses the answer.

        Raises:
            ServerError: the server rejected the request, or does not answer.
        """
        body, sent = sampling.body(self.model, prompt), time.perf_counter()
        with self._answering():
            if not stream:
                response = self._checked(self.http.post(PATH, json=body | UNSTREAMED[self.kind]))
                return lambda: unstreamed(f"{self.name}: {self.url}", _object(response))
            with self.http.stream("POST", PATH, json=body | STREAMED) as response:
                if response.status_code != 200:
                    response.read()
                self._checked(response)
                # The returned function parses the lines, after the clock has stopped.
                events = [
                    (time.perf_counter(), line) for line in lines_of(response.iter_text()) if line.startswith("data: {")
                ]
        return lambda: streamed(f"{self.name}: {self.url}", sent, events)

    def require_messages(self, prompts: Sequence[Prompt]) -> None:
        """Check that the server accepts the prompts, or raise ServerError: only SGLang's accept token ids."""
        if self.kind is not ServerKind.SGLANG and any(isinstance(prompt, TokenIds) for prompt in prompts):
            cure = 'drop --dataset hopeless, and lines of --data with "input_ids"'
            what = f"{self.url} is no SGLang server, and token ids are sent only to SGLang servers; {cure}"
            raise ServerError(f"{self.name}: {what}")

    def likeliest(self, context: Sequence[int]) -> Mapping[int, float]:
        if self.kind is not ServerKind.SGLANG:
            return {}
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        body = {"input_ids": list(context), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        with self._answering():
            response = self._checked(self.http.post("/generate", json=body))
        return {token: logprob for logprob, token, _ in response.json()["meta_info"]["output_top_logprobs"][0]}

    def counted(self) -> Steps | None:
        if self.kind is not ServerKind.VLLM:
            return None
        with self._answering():
            return vllm_steps(self.http.get("/metrics").text)

    def widths(self) -> dict[str, int] | None:
        dflash = self._dflash(self._server_info())
        return dflash["width"]["n_steps"] if dflash else None

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {"url": self.url, "kind": str(self.kind), "model": self.model}
        if self.kind is ServerKind.VLLM:
            with self._answering():
                about["version"] = self._get("/version").get("version")
        info = self._server_info()
        about |= {name: info[name] for name in ABOUT if info.get(name) is not None}
        if dflash := self._dflash(info):
            about |= {"sglang_dflash": dflash["version"], "width": dflash["width"]["policy"]}
        return about

    def _server_info(self) -> dict[str, Any]:
        if self.kind is not ServerKind.SGLANG:
            return {}
        with self._answering():
            return self._get("/server_info")

    @staticmethod
    def _dflash(info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the report of this plugin's worker; empty with other workers."""
        return info.get("internal_states", [{}])[0].get("dflash") or {}

    def _whose(self) -> ServerKind:
        if "internal_states" in self._get("/server_info"):
            return ServerKind.SGLANG
        return ServerKind.VLLM if set(self._get("/version")) == {"version"} else ServerKind.OTHER

    def _models(self) -> list[str]:
        """Return the names of the served models, at least one.

        Raises:
            ServerError: the server refuses the key, or returns no list of models.
        """
        response = self.http.get("/v1/models")
        found = _object(response).get("data") or ()
        if names := [str(model["id"]) for model in found if isinstance(model, dict) and "id" in model]:
            return names
        what = f"{self.name}: {self.url}/v1/models answered {response.status_code}"
        if response.status_code in REFUSED:
            raise ServerError(f"{what}; give the server's API key with --api-key")
        cure = "wait until the server is ready, or give the URL of an OpenAI-compatible server"
        raise ServerError(f"{what} without a model; {cure}")

    def _get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at `path`; empty if there is none."""
        return _object(self.http.get(path))

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.status_code != 200:
            what = f"{response.request.url.path} answered {response.status_code}: {response.text[:500]}"
            raise ServerError(f"{self.name}: {self.url}{what}")
        return response

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn a lost connection into a ServerError, which names the server."""
        try:
            yield
        except httpx.TransportError as error:
            what = f"{self.url} stopped answering ({type(error).__name__}); look at its log"
            raise ServerError(f"{self.name}: {what}") from error


def _object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object that a response with status 200 contains; else empty."""
    try:
        found = response.json() if response.status_code == 200 else {}
    except ValueError:  # no JSON, or no UTF-8
        return {}
    return found if isinstance(found, dict) else {}


def steps_of(meta: Mapping[str, Any], n_tokens: int) -> Steps:
    """Return the steps of an answer from SGLang's `meta_info`.

    Without speculation there are no counters, and each token after the first is a step. The prefill generates the first
    token. So an answer of one token has no step, and it has no counters even with speculation.
    """
    by_accepted = meta.get("spec_correct_drafts_histogram", ())  # numbers of steps that accepted 0, 1, 2, ... drafts
    reached_D = tuple(sum(by_accepted[n:]) for n in range(1, len(by_accepted)))
    return Steps(meta.get("spec_verify_ct", n_tokens - 1), meta.get("spec_num_correct_drafts", 0), reached_D)


def lines_of(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text, each once it is complete. Only a line feed ends a line.

    httpx also ends lines at U+2028 and other characters that JSON strings may contain.
    """
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        yield from whole
    if rest:
        yield rest


def unstreamed(server: str, reply: dict[str, Any]) -> Completion:
    """Parse an answer of `server`, the name in errors. Raises ServerError if the answer reports no number of tokens."""
    try:
        choice, usage = reply["choices"][0], reply["usage"]
        n_tokens, n_prompt_tokens, message = usage["completion_tokens"], usage["prompt_tokens"], choice["message"]
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{server} sent an answer without choices or usage; measure another server") from error
    meta = choice.get("meta_info")
    return Completion(
        n_tokens=n_tokens,
        token_ids=tuple(choice.get("response_token_ids") or choice.get("token_ids") or ()),
        text="".join(_parts(message)),
        steps=steps_of(meta, n_tokens) if meta is not None else None,
        n_prompt_tokens=n_prompt_tokens,
        prompt_ids=tuple(choice.get("prompt_token_ids") or ()),
    )


def streamed(server: str, sent: float, events: Sequence[tuple[float, str]]) -> Completion:
    """Parse a stream of events of `server` (the name in errors), each with its time of arrival.

    Raises:
        ServerError: the stream reports an error, or no number of tokens.
    """
    times, usage = list[float](), {"completion_tokens": 0, "prompt_tokens": 0}
    thoughts = content = ""
    for at, line in events:
        event = json.loads(line.removeprefix("data: "))
        if error := event.get("error"):
            raise ServerError(f"{server} sent an error in a stream ({str(error)[:200]}); see the server's log")
        usage = event.get("usage") or usage
        delta = event["choices"][0]["delta"] if event.get("choices") else {}
        new_thoughts, new_content = delta.get("reasoning_content") or delta.get("reasoning") or "", delta.get("content")
        if new_thoughts or new_content:
            times.append(at)
            thoughts, content = thoughts + new_thoughts, content + (new_content or "")
    n_tokens = usage["completion_tokens"]
    if not n_tokens:
        raise ServerError(
            f"{server} streams no `usage`, so tokens cannot be counted; add --no-latency to skip streamed runs"
        )
    return Completion(
        n_tokens=n_tokens,
        text="".join(_parts({"reasoning_content": thoughts, "content": content})),
        n_prompt_tokens=usage["prompt_tokens"],
        ttft_s=times[0] - sent if times else NAN,
        tpot_s=(times[-1] - times[0]) / (n_tokens - 1) if times and n_tokens > 1 else NAN,
    )


def _parts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasoning, which servers send under one of two names, and the answer."""
    if thoughts := message.get("reasoning_content") or message.get("reasoning"):
        yield f"<think>{thoughts}</think>"
    yield message.get("content") or ""


def vllm_steps(metrics: str) -> Steps | None:
    """Return the counts of steps in vLLM's Prometheus metrics, summed over its engines; None without speculation."""
    values: dict[str, float] = {}
    for name, labels, value in re.findall(r"^([\w:]+)(\{[^}]*\})? (\S+)$", metrics, re.MULTILINE):
        position = re.search(r'position="(\d+)"', labels)
        key = name + (f" {position[1]}" if position else "")
        values[key] = values.get(key, 0.0) + float(value)
    if STEPS not in values:
        return None
    reached_D = list[int]()
    while (key := f"{ACCEPTED_AT} {len(reached_D)}") in values:
        reached_D.append(int(values[key]))
    return Steps(int(values[STEPS]), int(values[ACCEPTED]), tuple(reached_D))
