"""Prompts for a target to answer: user turns that the target itself writes, and tasks about code and text.

If a chat model continues the header of a user turn, it writes a typical question. `OPENINGS` are first words of
questions, which add variety. Tasks contain functions and documentation from installed Python packages.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerBase

from sglang_dflash.models.sources import tasks
from sglang_dflash.train.answers import Messages, Source

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


def user_turns(source: Source, tokenizer: PreTrainedTokenizerBase, n: int, seed: int) -> Iterator[Messages]:
    """Generate `n` user turns with the target, and return the distinct ones of 8 to 400 characters."""
    before, after = user_header(tokenizer)
    starts = [(before, OPENINGS[i % len(OPENINGS)]) for i in range(n)]
    found = {text.strip() for text in source.user_turns(starts, after.strip().splitlines()[0], seed)}
    return ([{"role": "user", "content": text}] for text in sorted(found) if 8 <= len(text) <= 400)


def write_prompts(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    folders: list[Path],
    out: Path,
    *,
    turns: int,
    n_tasks: int,
    seed: int,
) -> int:
    """Write prompts to the file `out` in random order, one conversation per line, and return their number."""
    written = list(user_turns(source, tokenizer, turns, seed)) if turns else []
    found = [*written, *tasks(folders, n_tasks, seed)]
    Random(seed).shuffle(found)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in found))
    return len(found)
