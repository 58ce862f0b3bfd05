"""Interface of an engine, which answers the requests of one arm of a benchmark."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from sglang_dflash.pairs.tiny.workloads import Message
from sglang_dflash.tools.bench.measure import Completion, Steps

Processes = Callable[[], Sequence[psutil.Process]]
EMPTY: Message = {"role": "user", "content": ""}


class TokenIds(tuple[int, ...]):
    """Prompt of token ids, without a chat template."""


Prompt = Sequence[Message] | TokenIds


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters, which all requests of a task share."""

    max_new_tokens: int
    temperature: float = 0.0
    thinking: bool = False
    ignore_eos: bool = False

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]:
        """Return the request body for `/v1/chat/completions`."""
        # SGLang reads token ids instead of the messages, but rejects a request without messages.
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


class Engine:
    """Engine of one arm.

    A subclass overrides `ask` and `describe`. The defaults of other methods mean that the engine lacks the feature.

    Attributes:
        name: name of the arm.
        kind: software of the engine. If two engines are of one kind and return token ids, their answers are compared
            by token ids, else by text.
    """

    name: str
    kind: str

    @property
    def processes(self) -> Processes | None:
        """Return a function that lists the engine's processes; None if they are unknown."""
        return None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make the engine usable inside the context. Outside it a server of `--serve` uses no CPU or GPU time."""
        yield

    def flush(self) -> bool:
        """Empty the prefix cache. Returns False if the engine has no way to do this."""
        return False

    def ask(self, prompt: Prompt, sampling: Sampling, *, stream: bool) -> Callable[[], Completion]:
        """Send a request and wait for the answer. Returns a function that parses the answer."""
        raise NotImplementedError

    def likeliest(self, context: Sequence[int]) -> Mapping[int, float]:
        """Return the two likeliest tokens after `context` and their log-probabilities; empty if unknown."""
        return {}

    def counted(self) -> Steps | None:
        """Return the steps of all requests since the engine's start; None if the engine has no such counters."""
        return None

    def widths(self) -> dict[str, int] | None:
        """Return the number of steps at each verify width since the engine's start; None if there are no counters."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return the engine's description for the document."""
        raise NotImplementedError
