"""Pairs that the demo serves, with their flags and questions.

These are SmolLM2-135M-Instruct, the tiny hybrid pair, or the user's own folders in place of the tiny ones.
"""

import os
from pathlib import Path
from random import Random
from typing import NamedTuple

from rich.console import Console

from sglang_dflash.errors import NoModelError
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import ASSETS, Pair

TASKS = ("times_table", "json_record", "python_function", "story")
SMOLLM2_DRAFT = ASSETS / "smollm2" / "draft"
FLAGS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--max-running-requests", "8"),
    *("--max-total-tokens", "8192"),
    "--sleep-on-idle",
)
TEXT = """\
A lighthouse marks a dangerous coast or the entrance of a harbour. Until the eighteenth century most of them burned wood
or coal in the open, and their keepers carried the fuel up the stairs all night. Oil lamps with mirrors made the light
stronger, and in 1823 Augustin Fresnel's lens made it visible from more than thirty kilometres away. Today most
lighthouses are lit by electricity, switch themselves on, and need no keeper. Ships find their way by satellite, but
many sailors still want a light that they can see with their own eyes."""
FUNCTION = '''\
def average(numbers, ignore_none=True):
    """Return the mean of a list of numbers."""
    total = 0
    count = 0
    for number in numbers:
        if number is None and ignore_none:
            continue
        total += number
        count += 1
    if count == 0:
        return 0.0
    return total / count'''
QUESTIONS = (
    ("question", "Why is the sky blue? Answer in one paragraph."),
    ("Python function", "Write a Python function that returns the n-th Fibonacci number."),
    ("summary", f"Summarize the following text in two sentences.\n\n{TEXT}"),
    ("edit", f"Return the function unchanged, but rename it to `mean`.\n\n```python\n{FUNCTION}\n```"),
)

Questions = tuple[tuple[str, str], ...]  # (kind, question)


class Show(NamedTuple):
    """A pair to serve, with its flags and questions."""

    name: str
    pair: Pair
    flags: tuple[str, ...]
    questions: Questions
    n_threads: int = 1  # threads of each server for matrix products


def tiny_show(pair: Pair = tiny.HYBRID) -> Show:
    """Return `pair` with the tiny pair's flags and questions. `pair` must have the tiny pair's architecture."""
    name = "the tiny pair" if pair == tiny.HYBRID else f"{pair.target} with {pair.draft}"
    return Show(name, pair, (*tiny.FLAGS, *tiny.HYBRID_FLAGS), tiny_questions())


def smollm2_show() -> Show:
    """Return SmolLM2-135M-Instruct and its draft, to be served in fp32, so that answers must be equal.

    On processors with bf16 instructions, fp32 products with packed weights (`platforms/cpu/packed.py`) decode faster
    than bf16 products (AMD EPYC, AVX512-BF16).

    Raises:
        NoModelError: see `smollm2.checkpoint`.
    """
    from sglang_dflash.pairs.smollm2 import smollm2  # imported here, because it takes seconds

    pair = Pair(smollm2.checkpoint(), SMOLLM2_DRAFT)
    return Show(smollm2.NAME, pair, (*FLAGS, "--dtype", "float32"), QUESTIONS, n_threads=os.cpu_count() or 1)


def chosen(target: Path | None, draft: Path | None, *, real: bool, console: Console) -> Show:
    """Return the pair to serve. If SmolLM2 cannot be downloaded, print the reason and return the tiny pair.

    Args:
        target: folder of a target that replaces the tiny one.
        draft: folder of a draft that replaces the tiny one.
        real: whether to serve SmolLM2; not together with a folder.
    """
    if target or draft:
        return tiny_show(Pair(target or tiny.HYBRID.target, draft or tiny.HYBRID.draft))
    if not real:
        return tiny_show()
    console.print("[dim]SmolLM2-135M-Instruct is read from the cache, or downloaded first: 93 MB, half a minute.[/]")
    try:
        return smollm2_show()
    except NoModelError as error:
        console.print(f"[yellow]{error}. The tiny pair is served instead.[/]")
        return tiny_show()


def tiny_questions() -> Questions:
    """Return one question of each kind in `TASKS`. The tiny pair was not trained on these questions."""
    from sglang_dflash.pairs.tiny.corpus import draw

    random = Random(1)
    return tuple((task.replace("_", " "), draw(random, held_out=True, task=task).prompt) for task in TASKS)
