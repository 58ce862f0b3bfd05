"""One chat completion of the OpenAI API as an answer with its counts and times.

What engines add to that API: SGLang 0.5.23 returns token ids and its speculative counters with an unstreamed answer
that asks for them, vLLM token ids. Requests go through httpx rather than the `openai` client, which builds an object
of every chunk while the clock runs.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from sglang_dflash.bench.measure import NAN, Answer, Steps
from sglang_dflash.host.names import Name
from sglang_dflash.servers.errors import ServerError
from sglang_dflash.tiny.workloads import Message

PATH = "/v1/chat/completions"


class TokenIds(tuple[int, ...]):
    """A prompt that goes to the target as it is."""


Prompt = Sequence[Message] | TokenIds


class Kind(StrEnum):
    """Whose server it is."""

    SGLANG = "sglang"
    VLLM = "vllm"
    OTHER = "openai"


PROTOCOL = "sglang.srt.entrypoints.openai.protocol"
# What is relied on of SGLang's HTTP interface; `tests/host` looks whether the installed one has it.
HTTP_NAMES = (
    Name(PROTOCOL, "ChatCompletionRequest", "chat_template_kwargs ignore_eos input_ids stream_options"),
    Name(PROTOCOL, "ChatCompletionRequest", "return_meta_info return_token_ids"),
    Name(PROTOCOL, "ChatCompletionResponseChoice", "meta_info prompt_token_ids response_token_ids"),
    Name(PROTOCOL, "SpecTokensDetails", "spec_verify_ct spec_num_correct_drafts spec_correct_drafts_histogram"),
)
EMPTY: Message = {"role": "user", "content": ""}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
# What makes a server tell more, unstreamed.
ASK_FOR: Mapping[Kind, dict[str, Any]] = {
    Kind.SGLANG: {"return_meta_info": True, "return_token_ids": True},
    Kind.VLLM: {"return_token_ids": True},
    Kind.OTHER: {},
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The same for every request of a task."""

    max_new_tokens: int
    temperature: float = 0.0
    thinking: bool = False
    ignore_eos: bool = False

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]:
        # SGLang takes token ids instead of what its template makes of the messages, and refuses a request without any.
        ids = {"input_ids": prompt} if isinstance(prompt, TokenIds) else {}
        return {
            "model": model,
            "messages": [EMPTY] if ids else list(prompt),
            **ids,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "chat_template_kwargs": {"enable_thinking": self.thinking},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


def ask(http: httpx.Client, kind: Kind, body: dict[str, Any]) -> Callable[[], Answer]:
    """Wait for the whole answer; it is read later, by what is returned.

    Raises:
        ServerError: the server refused the request, or is gone.
    """
    try:
        response = http.post(PATH, json=body | ASK_FOR[kind])
    except httpx.TransportError as error:
        raise ServerError(gone(http, error)) from error
    if response.status_code != 200:
        raise ServerError(refusal(http, response))
    return lambda: _unstreamed(response.json())


def ask_streamed(http: httpx.Client, body: dict[str, Any]) -> Callable[[], Answer]:
    """The same, with the times of the first and the last text.

    Raises:
        ServerError: the server refused the request, or is gone.
    """
    sent = time.perf_counter()
    try:
        events = _events(http, body | STREAMED)
    except httpx.TransportError as error:
        raise ServerError(gone(http, error)) from error
    return lambda: _streamed(sent, events)


def _events(http: httpx.Client, body: dict[str, Any]) -> list[tuple[float, str]]:
    """When each came, and its line; nothing is parsed while the clock runs."""
    with http.stream("POST", PATH, json=body) as reply:
        if reply.status_code != 200:
            reply.read()
            raise ServerError(refusal(http, reply))
        return [(time.perf_counter(), line) for line in reply.iter_lines() if line.startswith("data: {")]


def gone(http: httpx.Client, error: httpx.TransportError) -> str:
    return f"{http.base_url} stopped answering ({type(error).__name__}); look at its log"


def refusal(http: httpx.Client, response: httpx.Response) -> str:
    return f"{http.base_url}{response.request.url.path} answered {response.status_code}: {response.text[:500]}"


def steps_of(meta: Mapping[str, Any], n_tokens: int) -> Steps:
    """SGLang's `meta_info`.

    Without speculation it has no counters: each token after the prefill's is a step of its own. With it, an answer that
    ended with the prefill's token has none either, and no step.
    """
    by_accepted = meta.get("spec_correct_drafts_histogram", ())  # steps that accepted 0, 1, 2, ... drafts
    reached_D = tuple(sum(by_accepted[n:]) for n in range(1, len(by_accepted)))
    return Steps(meta.get("spec_verify_ct", n_tokens - 1), meta.get("spec_num_correct_drafts", 0), reached_D)


def _unstreamed(reply: dict[str, Any]) -> Answer:
    choice, usage = reply["choices"][0], reply["usage"]
    meta, n_tokens = choice.get("meta_info"), usage["completion_tokens"]
    return Answer(
        n_tokens=n_tokens,
        token_ids=tuple(choice.get("response_token_ids") or choice.get("token_ids") or ()),
        text=_text(choice["message"]),
        steps=steps_of(meta, n_tokens) if meta is not None else None,
        n_prompt_tokens=usage["prompt_tokens"],
        prompt_ids=tuple(choice.get("prompt_token_ids") or ()),
    )


def _streamed(sent: float, events: Sequence[tuple[float, str]]) -> Answer:
    times, usage = list[float](), {"completion_tokens": 0, "prompt_tokens": 0}
    thoughts = content = ""
    for at, line in events:
        event = json.loads(line.removeprefix("data: "))
        usage = event.get("usage") or usage
        delta = event["choices"][0]["delta"] if event.get("choices") else {}
        if _text(delta):
            times.append(at)
            thoughts, content = thoughts + _thoughts(delta), content + (delta.get("content") or "")
    n_tokens = usage["completion_tokens"]
    if not n_tokens:
        raise ServerError("a stream came without `usage`; without it tokens cannot be counted, so add --no-latency")
    return Answer(
        n_tokens=n_tokens,
        text=_text({"reasoning_content": thoughts, "content": content}),
        n_prompt_tokens=usage["prompt_tokens"],
        ttft_s=times[0] - sent if times else NAN,
        tpot_s=(times[-1] - times[0]) / (n_tokens - 1) if times and n_tokens > 1 else NAN,
    )


def _text(message: Mapping[str, Any]) -> str:
    """Reasoning and answer."""
    thoughts = _thoughts(message)
    return (f"<think>{thoughts}</think>" if thoughts else "") + (message.get("content") or "")


def _thoughts(message: Mapping[str, Any]) -> str:
    """By either of the names servers have for it."""
    return message.get("reasoning_content") or message.get("reasoning") or ""
