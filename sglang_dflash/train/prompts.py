"""Prompts for a target to answer: user turns that the target itself writes, and tasks about code and text.

If a chat model continues the header of a user turn, it writes a typical question. `OPENINGS` are first words of
questions, which add variety. Tasks contain functions and documentation from installed Python packages.
"""

import json
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sglang_dflash.pairs.smollm2.sources import tasks
from sglang_dflash.train.answers import Messages, Source, whole_lines

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


def user_turns(
    source: Source, tokenizer: PreTrainedTokenizerBase, n: int, seed: int, write: Callable[[Messages], None]
) -> None:
    """Let the target write `n` user turns. Pass each turn that has 8 to 400 characters to `write` on arrival.

    Raises:
        ValueError: there is no chat template, or it marks no end of a user turn.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the target has no chat template, with which it writes user turns; give --turns 0")
    before, after = user_header(tokenizer)
    if not after.strip():
        raise ValueError("the chat template marks no end of a user turn; give --turns 0")
    starts = [(before, OPENINGS[i % len(OPENINGS)]) for i in range(n)]

    def turn(text: str) -> None:
        if 8 <= len(text.strip()) <= 400:
            write([{"role": "user", "content": text.strip()}])

    source.user_turns(starts, after.strip().splitlines()[0], seed, turn)


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
    """Append prompts that `out` lacks, one conversation per line, and return the number of prompts in the file.

    Tasks come first. A repeated run with the same options resumes: it requests as many user turns as the file lacks.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    found = set(whole_lines(out))
    asked_for = [json.dumps({"messages": messages}) for messages in tasks(folders, n_tasks, seed)]
    n_turns = len(found - set(asked_for))
    with out.open("a") as file:

        def add(line: str) -> None:
            if line not in found:
                found.add(line)
                file.write(line + "\n")
                file.flush()

        for line in asked_for:
            add(line)
        if turns > n_turns:
            # A new seed: the old one would repeat the turns in the file.
            options = (turns - n_turns, seed + n_turns)
            user_turns(source, tokenizer, *options, lambda messages: add(json.dumps({"messages": messages})))
    return len(found)
