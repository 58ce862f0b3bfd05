"""Prompts for a target to answer: user turns that the target itself writes, and tasks about code and text.

A chat model that continues its own user header writes what its users would ask; the openings steer it a little. Tasks
take functions and documentation from Python packages that are installed.
"""

import ast
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerBase

from sglang_dflash.train.answers import Messages, in_flight

OPENINGS = (
    *("", "What", "How", "Why", "Who", "When", "Can you", "Write", "Write a Python function", "Write a short story"),
    *("Explain", "Give me", "List", "Describe", "Summarize", "Translate", "I want to", "I have", "Is it", "Which"),
    *("Create", "Help me", "Tell me about", "Compare", "Rewrite", "Please", "Write an email"),
)
ON_CODE = (
    "Explain what this function does.",
    "Write a docstring for this function.",
    "Add type hints to this function.",
    "Rewrite this function so that it is easier to read.",
    "Rename the variables of this function to longer names.",
    "Add a check of the arguments to this function.",
    "Write a test for this function.",
    "Add comments to this function.",
    "Return the function unchanged, but rename it to `new_name`.",
)
ON_TEXT = (
    "Summarize the following text in two sentences.",
    "Summarize the text below in a short paragraph.",
    "List the main points of this text.",
    "Explain the following to a beginner.",
    "Rewrite this text in simple words.",
    "Correct the grammar of this text and repeat it.",
    "Continue this text.",
    "Ask three questions about this text and answer them.",
)
NOT_SOURCE = {"site-packages", "test", "tests"}
SENTINEL = "SENTINEL"


def user_header(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return what the chat template writes before and after the content of a first user turn."""
    turn = [{"role": "user", "content": SENTINEL}]
    before, _, after = str(tokenizer.apply_chat_template(turn, tokenize=False)).partition(SENTINEL)
    return before, after


async def user_turns(
    client: AsyncOpenAI, tokenizer: PreTrainedTokenizerBase, n: int, seed: int, at_once: int
) -> Iterator[Messages]:
    """Let the target write `n` user turns at T = 0.9; sensible lengths alone are kept, each once."""
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


def sources(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield text and syntax tree of the Python files below `folder`; templates do not parse and are left out."""
    for path in sorted(folder.rglob("*.py")):
        if NOT_SOURCE & set(path.relative_to(folder).parts):
            continue
        try:
            text = path.read_text()
            yield text, ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue


def pieces(text: str, tree: ast.Module) -> Iterator[tuple[bool, str]]:
    """Yield (is code, text) of one file: functions of 4 to 30 lines, and docstrings of 200 to 1,200 characters."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        doc = ast.get_docstring(node)
        if doc and 200 <= len(doc) <= 1200:
            yield False, doc
        if isinstance(node, ast.FunctionDef) and 4 <= (node.end_lineno or 0) - node.lineno + 1 <= 30:
            source = ast.get_source_segment(text, node)
            if source and len(source) <= 1200:
                yield True, source


def tasks(folders: list[Path], n: int, seed: int) -> Iterator[Messages]:
    """Yield `n` tasks about code and text from `folders`, half of each where both are found."""
    random = Random(seed)
    found = sorted({piece for folder in folders for source in sources(folder) for piece in pieces(*source)})
    for is_code in (True, False):
        these = [text for code, text in found if code == is_code]
        for text in random.sample(these, min(len(these), n // 2)):
            task = random.choice(ON_CODE if is_code else ON_TEXT)
            body = f"```python\n{text}\n```" if is_code else text
            yield [{"role": "user", "content": f"{task}\n\n{body}"}]


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
    """Write prompts to the file `out` in random order, one conversation a line; returns how many."""

    async def written() -> list[Messages]:
        async with AsyncOpenAI(base_url=server, api_key="none", timeout=3600) as client:
            return list(await user_turns(client, tokenizer, turns, seed, at_once)) if turns else []

    found = [*asyncio.run(written()), *tasks(folders, n_tasks, seed)]
    Random(seed).shuffle(found)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in found))
    return len(found)
