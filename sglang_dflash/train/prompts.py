"""Prompts for a target to answer: user turns that the target itself writes, and tasks about code and text.

If a chat model continues the header of a user turn, it writes a typical question. `OPENINGS` are first words of
questions, which add variety. Tasks contain functions and documentation from installed Python packages.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerBase

from sglang_dflash.models.sources import tasks
from sglang_dflash.train.answers import Messages, in_flight

OPENINGS = (
    *("", "What", "How", "Why", "Who", "When", "Can you", "Write", "Write a Python function", "Write a short story"),
    *("Explain", "Give me", "List", "Describe", "Summarize", "Translate", "I want to", "I have", "Is it", "Which"),
    *("Create", "Help me", "Tell me about", "Compare", "Rewrite", "Please", "Write an email"),
)
SENTINEL = "SENTINEL"


def user_header(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the chat template's text before and after the content of a first user turn."""
    turn = [{"role": "user", "content": SENTINEL}]
    before, _, after = str(tokenizer.apply_chat_template(turn, tokenize=False)).partition(SENTINEL)
    return before, after


async def user_turns(
    client: AsyncOpenAI, tokenizer: PreTrainedTokenizerBase, n: int, seed: int, at_once: int
) -> Iterator[Messages]:
    """Generate `n` user turns with the target at temperature 0.9, and return the distinct ones of 8 to 400 characters.

    Turns that reach the limit of 120 tokens are left out.
    """
    before, after = user_header(tokenizer)
    model = (await client.models.list()).data[0].id
    stop = after.strip().splitlines()[0]

    async def one(i: int) -> str:
        opening = OPENINGS[i % len(OPENINGS)]
        reply = await client.completions.create(
            model=model, prompt=before + opening, max_tokens=120, temperature=0.9, seed=seed + i, stop=stop
        )
        finished = reply.choices[0].finish_reason == "stop"
        return (opening + reply.choices[0].text).strip() if finished else ""

    found = [text async for text in in_flight((one(i) for i in range(n)), at_once)]
    return ([{"role": "user", "content": text}] for text in sorted(set(found)) if 8 <= len(text) <= 400)


def write_prompts(
    server: str,
    tokenizer: PreTrainedTokenizerBase,
    folders: list[Path],
    out: Path,
    *,
    turns: int,
    n_tasks: int,
    seed: int,
    at_once: int,
) -> int:
    """Write prompts to the file `out` in random order, one conversation per line, and return their number."""

    async def written() -> list[Messages]:
        async with AsyncOpenAI(base_url=server, api_key="none", timeout=3600) as client:
            return list(await user_turns(client, tokenizer, turns, seed, at_once)) if turns else []

    found = [*asyncio.run(written()), *tasks(folders, n_tasks, seed)]
    Random(seed).shuffle(found)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in found))
    return len(found)
