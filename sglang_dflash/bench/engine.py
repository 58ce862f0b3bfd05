"""Interface of an engine, one arm of a benchmark, and its requests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from sglang_dflash.bench.measure import Completion, Steps
from sglang_dflash.tiny.workloads import Message

Processes = Callable[[], Sequence[psutil.Process]]
EMPTY: Message = {"role": "user", "content": ""}


class TokenIds(tuple[int, ...]):
    """Prompt of token ids, without a chat template."""


Prompt = Sequence[Message] | TokenIds


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters, the same for every request of a task."""

    max_new_tokens: int
    temperature: float = 0.0
    thinking: bool = False
    ignore_eos: bool = False

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]:
        """Return the request body for `/v1/chat/completions`."""
        # SGLang accepts token ids in place of messages, but requires messages.
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
    """One arm. The default methods are for an engine without the feature.

    Attributes:
        name: of the arm.
        kind: answers are compared by token ids between engines of one kind, else by text.
    """

    name: str
    kind: str

    @property
    def processes(self) -> Processes | None:
        """Return a function that lists the engine's processes; None if they are unknown."""
        return None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make the engine usable inside the context. Outside it uses no CPU or GPU time."""
        yield

    def flush(self) -> bool:
        """Empty the prefix cache. Returns whether this is possible."""
        return False

    def ask(self, prompt: Prompt, sampling: Sampling, *, stream: bool) -> Callable[[], Completion]:
        """Send a request and wait for the answer. Returns a function that parses it."""
        raise NotImplementedError

    def likeliest(self, context: Sequence[int]) -> Mapping[int, float]:
        """Return the two likeliest tokens after `context` and their log-probabilities; empty if unknown."""
        return {}

    def counted(self) -> Steps | None:
        """Return the steps of all requests since the engine's start; None if it has no such counters."""
        return None

    def widths(self) -> dict[str, int] | None:
        """Return the steps by width since the engine's start; None if it has no such counters."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return the engine's description for the document."""
        raise NotImplementedError
