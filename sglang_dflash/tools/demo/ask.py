"""Client that sends a question and streams the answer. A chunk has one step's text, and the number of tokens so far."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import openai

from sglang_dflash.tools.bench.measure import Steps

MAX_TOKENS = 160

Message = dict[str, str]  # role, content


class Step(NamedTuple):
    """Content of one chunk: one verify step, or the prefill's token."""

    text: str
    n_tokens: int  # number of new tokens


class Answer(NamedTuple):
    """Answer to one question, with the number of its decode steps and accepted drafts."""

    text: str
    n_tokens: int
    seconds: float
    n_steps: int
    n_accepted: int

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds

    @property
    def committed_per_step(self) -> float:
        return Steps(self.n_steps, self.n_accepted).committed_per_step if self.n_steps else 1.0


def ask(
    client: openai.OpenAI, messages: str | Sequence[Message], show: Callable[[Step], None], *, rid: str | None = None
) -> Answer:
    """Request a greedy streamed chat completion, and call `show` with every step as it arrives.

    Args:
        messages: a conversation, or one question as text.
        rid: id of the request on the server.

    Raises:
        openai.APIError: the server rejects the request, or does not answer.
    """
    question = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    text, n_tokens, sent = "", 0, time.perf_counter()
    details: dict[str, Any] = {}
    arrived = sent
    stream = client.chat.completions.create(
        model="default",
        messages=cast("Any", question),
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options=cast("Any", {"include_usage": True, "continuous_usage_stats": True}),
        extra_body={"return_spec_tokens_details": True, "rid": rid},
    )
    for chunk in stream:
        details |= (chunk.model_extra or {}).get("sglext") or {}
        if not chunk.choices or chunk.usage is None:
            continue
        step = Step(chunk.choices[0].delta.content or "", chunk.usage.completion_tokens - n_tokens)
        text, n_tokens, arrived = text + step.text, n_tokens + step.n_tokens, time.perf_counter()
        show(step)
    counters = details.get("spec_tokens_details") or {"spec_verify_ct": 0, "spec_num_correct_drafts": 0}
    return Answer(text, n_tokens, arrived - sent, counters["spec_verify_ct"], counters["spec_num_correct_drafts"])
