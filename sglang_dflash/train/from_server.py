"""Training text from a served target, by its OpenAI API."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from openai import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
)
from openai.types.chat import ChatCompletionMessage

from sglang_dflash.cli import require_url
from sglang_dflash.train.answers import Line, Sampling, Write

TIMEOUT_S = 3600


class ServerSource:
    """Server of the target, with at most `at_once` requests in flight. See `answers.Source`."""

    def __init__(self, url: str, at_once: int, client: AsyncOpenAI | None = None, *, api_key: str = "none") -> None:
        """Create the client.

        Raises:
            ValueError: the URL has no http://, or its host or port is invalid.
        """
        if "://" not in url:
            raise ValueError(f"--server {url} has no http://; did you mean http://{with_v1(url)}?")
        require_url(url, "--server")
        self.url = url
        self.at_once = at_once
        self.client = client or AsyncOpenAI(base_url=url, api_key=api_key, timeout=TIMEOUT_S)

    def answer(self, prompts: Sequence[tuple[int, Line]], sampling: Sampling, write: Write) -> None:
        async def run() -> None:
            model = await self.model()
            work = (ask(self.client, model, line, sampling, number) for number, line in prompts)
            async for line in in_flight(work, self.at_once):
                write(line)

        self._run(run())

    def user_turns(self, starts: Sequence[tuple[str, str]], stop: str, seed: int, write: Callable[[str], None]) -> None:
        async def run() -> None:
            model = await self.model()

            async def one(number: int, before: str, opening: str) -> str | None:
                reply = await self.client.completions.create(
                    model=model, prompt=before + opening, max_tokens=120, temperature=0.9, seed=seed + number, stop=stop
                )
                choice = reply.choices[0]
                return opening + choice.text if choice.finish_reason == "stop" else None

            work = (one(number, *start) for number, start in enumerate(starts))
            async for text in in_flight(work, self.at_once):
                if text is not None:
                    write(text)

        self._run(run())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            asyncio.run(work)
        except APIError as error:
            raise ValueError(
                f"a request to {self.url} failed ({_reason(error)}); {self._cure(error)}. Written lines are kept"
            ) from error

    def _cure(self, error: APIError) -> str:
        if isinstance(error, APITimeoutError):
            return "see the server's log, then repeat the command"
        if isinstance(error, APIConnectionError):
            https = " (https needs a certificate of a public authority)" if self.url.startswith("https:") else ""
            return f"start the server or correct --server{https}, then repeat the command"
        if isinstance(error, NotFoundError) and self.url.rstrip("/") != with_v1(self.url):
            return f"repeat the command with --server {with_v1(self.url)}"
        if isinstance(error, AuthenticationError | PermissionDeniedError):
            return "repeat the command with the server's key as --api-key"
        return "see the server's log, then repeat the command"

    async def model(self) -> str:
        """Return the name of the served model, or raise ValueError if there is none."""
        answer = await self.client.models.with_raw_response.list()
        try:
            return str(json.loads(answer.text)["data"][0]["id"])
        except IndexError:
            cure = "start a model there, then repeat the command"
            raise ValueError(f"--server {self.url} lists no model; {cure}") from None
        except (ValueError, KeyError, TypeError):
            cure = "give the URL of an OpenAI API, ending in /v1"
            raise ValueError(f"--server {self.url} lists no model; {cure}") from None


def with_v1(url: str) -> str:
    """Return the URL with its path cut at /v1, the path of the OpenAI API, or with /v1 added."""
    scheme, colon, rest = url.rpartition("://")
    return f"{scheme}{colon}{rest.partition('/v1')[0].rstrip('/')}/v1"


def _reason(error: APIError) -> str:
    """Return the text of the error; for a lost connection, that of the error's cause, which says more."""
    is_lost = isinstance(error, APIConnectionError) and not isinstance(error, APITimeoutError)
    return (str(error.__cause__ or "") if is_lost else "") or str(error)


async def ask(client: AsyncOpenAI, model: str, line: Line, sampling: Sampling, number: int) -> Line | None:
    """Return the line with the target's answer; None if the answer is empty.

    Args:
        number: the prompt's number, from 0.
    Raises:
        ValueError: the server rejects the prompt.
    """
    try:
        reply = await client.chat.completions.create(
            model=model,
            messages=line["messages"],
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature_of(number),
            seed=sampling.seed + number,
            extra_body={key: value for key, value in line.items() if key != "messages"},
        )
    except BadRequestError as error:
        raise ValueError(
            f"the server rejects prompt {number + 1} ({error}); shorten or remove it, lower --max-tokens, or see "
            "the server's log, then repeat the command. Written lines are kept"
        ) from error
    answer = answer_of(reply.choices[0].message)
    return line | {"messages": [*line["messages"], answer]} if answer else None


def answer_of(message: ChatCompletionMessage) -> dict[str, Any] | None:
    """Return the answer as a message with its reasoning and tool calls; None if it has neither text nor tool calls."""
    text, thoughts = message.content, (message.model_extra or {}).get("reasoning_content")
    if not message.tool_calls and not (text and text.strip()):
        return None
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        answer["reasoning_content"] = thoughts
    if message.tool_calls:
        kept = {"id", "type", "function"}
        answer["tool_calls"] = [call.model_dump(include=kept) for call in message.tool_calls]
    return answer


async def in_flight(work: Iterator[Any], at_once: int) -> AsyncIterator[Any]:
    """Yield the results of coroutines as they finish, with at most `at_once` running."""
    running: set[asyncio.Task[Any]] = set()
    for coroutine in work:
        running.add(asyncio.create_task(coroutine))
        if len(running) >= at_once:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    for result in asyncio.as_completed(running):
        yield await result
