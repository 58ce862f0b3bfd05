"""Training text from the target: its OpenAI-compatible server answers prompts, one line of JSON per conversation.

Each line is written when its answer arrives, so an interrupted run resumes with the prompts that have no line yet.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from openai import APIError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessage
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

from sglang_dflash.train.chat import require_line

Messages = list[dict[str, Any]]
Line = dict[str, Any]  # messages, and perhaps tools and chat_template_kwargs


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Every second prompt is answered at `temperature`, the others (0, 2, ...) greedily."""

    temperature: float = 0.7
    max_tokens: int = 256
    seed: int = 0


def name_of(line: Line) -> str:
    """Return a digest, 16 hex digits, of a line without its answer: messages, tools and template variables."""
    return sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:16]


def read_prompts(path: Path) -> list[Line]:
    """Return the conversations of a .jsonl file.

    Raises:
        ValueError: a line is no conversation, or its last turn is not of the user or of a tool.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        row = json.loads(line)
        messages = row.get("messages") if isinstance(row, dict) else None
        if not messages or messages[-1].get("role") not in ("user", "tool"):
            raise ValueError(
                f'{path}, line {number}: give {{"messages": [...]}} whose last turn is of the user or of a tool'
            )
        try:
            require_line(row)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        found.append(row)
    return found


def answered(out: Path) -> Iterator[str]:
    """Remove an incomplete last line from the file `out`, and yield the names of the conversations in the file."""
    if not out.exists():
        return
    text = out.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        out.write_text(whole)
    for line in whole.splitlines():
        row = json.loads(line)
        yield name_of(row | {"messages": row["messages"][:-1]})


async def ask(client: AsyncOpenAI, model: str, line: Line, sampling: Sampling, number: int) -> Line | None:
    """Return the line with the target's answer; None if the answer is empty. `number`: the line's number, from 0."""
    reply = await client.chat.completions.create(
        model=model,
        messages=line["messages"],
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature if number % 2 else 0.0,
        seed=sampling.seed + number,
        extra_body={key: value for key, value in line.items() if key != "messages"},
    )
    answer = answer_of(reply.choices[0].message)
    return line | {"messages": [*line["messages"], answer]} if answer else None


def answer_of(message: ChatCompletionMessage) -> dict[str, Any] | None:
    """Return the answer as a message with its reasoning and tool calls; None if it is empty."""
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


async def write_answers(
    client: AsyncOpenAI, prompts: Sequence[Line], out: Path, sampling: Sampling, *, at_once: int
) -> int:
    """Append a line to `out` for each prompt that has none yet, with at most `at_once` requests in flight.

    A prompt with an empty answer gets no line.

    Returns:
        The number of lines written.

    Raises:
        openai.APIError: a request fails. Lines that are already written remain.
    """
    model = (await client.models.list()).data[0].id
    done = set(answered(out))
    missing = [(number, line) for number, line in enumerate(prompts) if name_of(line) not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    columns = (*Progress.get_default_columns()[:2], TimeElapsedColumn(), TimeRemainingColumn())
    with out.open("a") as file, Progress(*columns) as progress:
        bar = progress.add_task("answers", total=len(prompts), completed=len(prompts) - len(missing))
        work = (ask(client, model, line, sampling, number) for number, line in missing)
        async for line in in_flight(work, at_once):
            progress.advance(bar)
            if line:
                file.write(json.dumps(line) + "\n")
                file.flush()
                written += 1
    return written


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


def run(server: str, prompts: Path, out: Path, sampling: Sampling, at_once: int) -> int:
    """Answer the prompts of a file and return the number of lines written.

    Raises:
        ValueError: the file is invalid, or a request fails.
    """
    client = AsyncOpenAI(base_url=server, api_key="none", timeout=3600)
    try:
        return asyncio.run(write_answers(client, read_prompts(prompts), out, sampling, at_once=at_once))
    except APIError as error:
        raise ValueError(f"{server} refused: {error}; the answers so far are in {out}") from error
