"""Do copies of the text commit more per step, and harm nothing where nothing is copied?

    python -m launch.measure_copies [--texts 24]      # no server: the tiny pairs in plain torch, and real texts

Answers are told first, greedy or drawn; what steps would have committed of them is then replayed, with copies and
without. A draft is kept where it is what the target says, at any temperature, so the replay is what a server does.

pairs       a question alone; asked again after its answer; another of its kind asked after it. Blocks are the draft's
real text   files of Python's library and texts that packages bring, in tokens of a vocabulary made of them, edited by
            a script: the prompt is the text, the answer the edited text. In the place of a draft, blocks are right for
            a geometric number of tokens, 2, 4 or 6 on average. Also in blocks of 24 and 32, and behind another file

A table for people; a JSON document, whose path is the last line of stdout.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from sglang_dflash_kernels.copy_draft import N_CLASSES, Texts, copy_draft
from sglang_dflash_kernels.weigh_copies import weigh_copies
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.model import DraftModel
from sglang_dflash.model.generate import Options, draft_logits, hidden_of_blocks, spec_steps
from sglang_dflash.model.target import stop_token_ids
from sglang_dflash.servers.document import file_name, head, write
from sglang_dflash.tiny import pairs as tiny
from sglang_dflash.tiny.corpus import TASKS, draw

PAIRS = {"hybrid": tiny.HYBRID, "dense": tiny.DENSE}
ANSWER, SHORTEST = 200, 4  # tokens of an answer
VOCABULARY, N_FILES = 32_000, 200
RIGHT, WIDTHS = (2, 4, 6), (16, 24, 32)  # tokens a block is right for, on average; tokens of a block
CUT = 4_000  # characters of a text
Guess = Callable[[int], Sequence[int]]  # the tokens a block has behind the one at a place of the text


def n_steps(text: Sequence[int], first: int, guess: Guess, *, copies: bool) -> int:
    """Steps that commit `text` from `first` on."""
    table = torch.tensor([[*text, *[0] * 64]], dtype=torch.int32)
    counts_1K2, totals_K2 = (torch.zeros(*size, dtype=torch.int32) for size in ((1, N_CLASSES, 2), (N_CLASSES, 2)))
    at, taken = first, 0
    while at < len(text) - 1:
        block_1N = torch.tensor([[text[at], *guess(at)]])
        texts = Texts(torch.tensor([at]), torch.zeros(1, dtype=torch.int64), table, counts_1K2)
        copied = copy_draft(block_1N, texts) if copies else None
        drafts = (copied.tokens_BN if copied else block_1N)[0, 1:].tolist()
        rest = text[at + 1 :]
        n = next((i for i, pair in enumerate(zip(drafts, rest, strict=False)) if pair[0] != pair[1]), None)
        n = min(len(drafts), len(rest) - 1) if n is None else n
        table[0, : len(text)] = torch.tensor(text, dtype=torch.int32)
        if copied:
            said = torch.zeros_like(block_1N)
            said[0, : n + 1] = torch.tensor(rest[: n + 1])
            weigh_copies(block_1N, copied, said, torch.tensor([n + 1], dtype=torch.int32), texts, totals_K2=totals_K2)
        at, taken = at + n + 1, taken + 1
    return taken


def compared(texts: Sequence[tuple[list[int], int, Guess]]) -> dict[str, float]:
    n_tokens = sum(len(text) - 1 - first for text, first, _ in texts)
    without, with_copies = (sum(n_steps(*one, copies=copies) for one in texts) for copies in (False, True))
    return {
        "n_texts": len(texts),
        "committed_per_step": n_tokens / without,
        "with_copies": n_tokens / with_copies,
        "times": without / with_copies,
    }


# -- the tiny pairs ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def of_pair(name: str, temperature: float, n_texts: int) -> Iterator[dict[str, Any]]:
    pair = PAIRS[name]
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    draft = DraftModel.from_pretrained(pair.draft, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    random = Random(7)
    torch.manual_seed(0)

    def answer(*said: str) -> tuple[list[int], list[int]]:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        options = Options(max_new_tokens=ANSWER, temperature=temperature, stop_token_ids=stop_token_ids(target))
        steps = spec_steps(draft, target, torch.tensor([prompt]), options)
        return prompt, [token for step in steps for token in step.committed]

    def guesses(prompt: list[int], said: list[int]) -> Guess:
        text = torch.tensor([*prompt, *said])
        at_A = torch.arange(len(prompt), len(text))
        hidden_ADH = hidden_of_blocks(draft, target, text, at_A, (draft.config.block_size, None))
        blocks = draft.guesses(hidden_ADH, draft_logits(hidden_ADH, target), text[at_A]).tolist()
        return lambda at: blocks[at - len(prompt)]

    kinds: dict[str, list[tuple[list[int], int, Guess]]] = {"alone": [], "asked again": [], "another of its kind": []}
    for i in range(n_texts):
        task = list(TASKS)[i % len(TASKS)]
        question, other = (draw(random, held_out=True, task=task).prompt for _ in range(2))
        first = answer(question)
        said = tokenizer.decode(first[1], skip_special_tokens=True)
        asked = first, answer(question, said, question), answer(question, said, other)
        for kind, (prompt, text) in zip(kinds, asked, strict=True):
            if len(text) >= SHORTEST:
                kinds[kind].append(([*prompt, *text], len(prompt), guesses(prompt, text)))
    for kind, texts in kinds.items():
        yield {"text": f"{name}, T = {temperature}", "kind": kind, "width": 16, **compared(texts)}


# -- real text ---------------------------------------------------------------------------------------------------------


def renamed(text: str, random: Random) -> str:
    word = random.choice(re.findall(r"\b[a-z_]{5,}\b", text))
    return re.sub(rf"\b{word}\b", f"{word}_new", text)


def lines_changed(text: str, random: Random) -> str:
    """Of a hundred lines five."""
    words = text.split()
    kept = (line for line in text.split("\n") if random.random() > 0.025)
    more = ((line, f"    # {' '.join(random.choices(words, k=5))}") for line in kept)
    return "\n".join(part for line, note in more for part in ([line, note] if random.random() < 0.025 else [line]))


def words_changed(text: str, random: Random) -> str:
    """Of a hundred words two."""
    words = text.split(" ")
    return " ".join(random.choice(words) if random.random() < 0.02 else word for word in words)


def indented(text: str, random: Random) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))


def quoted(text: str, random: Random) -> str:
    return text[len(text) // 3 : 2 * len(text) // 3]


CODE, PROSE = "code", "prose"
EDITS = {
    "a name changed": (CODE, renamed),
    "lines changed": (CODE, lines_changed),
    "words changed": (PROSE, words_changed),
    "a third quoted": (PROSE, quoted),
    "indented": (CODE, indented),
}
OTHER = "behind another file"


def library() -> dict[str, list[str]]:
    packages = Path(sysconfig.get_path("purelib"))
    code = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    prose = sorted(path for pattern in ("LICENSE*", "*.md", "*.rst") for path in packages.rglob(pattern))
    found = {
        kind: [path.read_text(errors="ignore") for path in paths[:N_FILES] if path.is_file()]
        for kind, paths in ((CODE, code), (PROSE, prose))
    }
    return {kind: [text for text in texts if len(text) > CUT] for kind, texts in found.items()}


def vocabulary(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    return tokenizer


def stand_in(text: list[int], right: int, width: int, seed: int) -> Guess:
    """Blocks whose guesses are right with one probability each, `right` on average, and behind that any tokens."""

    def guess(at: int) -> list[int]:
        random, guesses = Random(f"{seed} {at}"), list[int]()
        while len(guesses) < width - 1 and random.random() < right / (right + 1):
            guesses.append(text[min(at + 1 + len(guesses), len(text) - 1)])
        return guesses + random.choices(text, k=width - 1 - len(guesses))

    return guess


def of_real_text(n_texts: int) -> Iterator[dict[str, Any]]:
    texts, random = library(), Random(0)
    tokenizer = vocabulary([text for kind in texts.values() for text in kind])

    def cut(kind: str) -> str:
        text = random.choice(texts[kind])
        start = random.randrange(len(text) - CUT + 1)
        return text[start : start + CUT]

    def tokens(prompt: str, answer: str) -> tuple[list[int], int]:
        asked = tokenizer.encode(f"{prompt}\n").ids
        return [*asked, *tokenizer.encode(answer).ids], len(asked)

    cases = {}
    for name, (kind, edit) in EDITS.items():
        cases[name] = [tokens(text, edit(text, random)) for text in (cut(kind) for _ in range(n_texts))]
    cases[OTHER] = [tokens(cut(CODE), cut(CODE)) for _ in range(n_texts)]
    for width in WIDTHS:
        for right in RIGHT:
            for name, pairs in cases.items():
                told = [(text, n, stand_in(text, right, width, i)) for i, (text, n) in enumerate(pairs)]
                yield {"text": f"real, {right} right", "kind": name, "width": width, **compared(told)}


# -- the report --------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.measure_copies", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=int, default=24, help="of each kind (%(default)s)")
    parser.add_argument(
        "--output", type=Path, help="the JSON file (launch/results/<date>-<machine>-<commit>-copies.json)"
    )
    options = parser.parse_args(arguments)
    table, rows = Table("text", "kind", "width", "tokens per step", "with copies", "times"), list[dict[str, Any]]()
    for name in PAIRS:
        for temperature in (0.0, 0.7):
            rows += of_pair(name, temperature, options.texts)
    rows += of_real_text(max(options.texts // 2, 1))
    for row in rows:
        numbers = (row["committed_per_step"], row["with_copies"], row["times"])
        table.add_row(row["text"], row["kind"], str(row["width"]), *(f"{number:.2f}" for number in numbers))
    Console(width=120).print(table)
    command = shlex.join(["python", "-m", "launch.measure_copies", *arguments])
    print(write(head("copies", command) | {"rows": rows}, options.output or tiny.RESULTS / file_name("copies")))


if __name__ == "__main__":
    main()
