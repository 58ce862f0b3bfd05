"""What a hit in the prefix cache costs a draft with a window, whose ring has nothing of the prefix.

    python -m launch.measure_hits [--window 64] [--conversations 60]      # the tiny pairs, in plain torch on a CPU

The next turn of a conversation is drafted three times: without a window, with the window as a full prefill leaves it,
and with nothing of the earlier turns in it. The last is what a server does (tests/server/test_exact.py compares their
steps). The text is the same every time; what differs is the tokens committed per step. Next turns: another question, or
the rest of an answer, cut in its middle, where the hit ends a number of tokens before the cut: those are read again,
and the draft sees them. What a window costs by itself is seen where a conversation is longer: `--turns`.

A table for people; a JSON document, whose path is the last line of stdout.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_dflash.bench.prompts import held_out, tokenize
from sglang_dflash.model import DraftModel
from sglang_dflash.model.generate import Options, spec_steps
from sglang_dflash.model.target import stop_token_ids
from sglang_dflash.servers.document import file_name, head, write
from sglang_dflash.tiny import pairs as tiny

ANSWER, SHORTEST = 128, 32  # tokens of an answer
STRETCHES = (0, 8, 16, 32, 64)  # of the answer's tokens: where a step begins
READ_AGAIN = (1, 8, 16, 32, 64)
PAIRS = {"hybrid": tiny.HYBRID, "dense": tiny.DENSE}

Steps = list[tuple[int, int]]  # tokens answered before a step, tokens it committed


class Models(NamedTuple):
    target: PreTrainedModel
    draft: DraftModel

    def answer(self, prompt: list[int], *, window: int | None, n_unseen: int = 0) -> tuple[list[int], Steps]:
        options = Options(
            max_new_tokens=ANSWER,
            stop_token_ids=stop_token_ids(self.target),
            draft_window=window,
            n_unseen=n_unseen,
        )
        committed = [step.committed for step in spec_steps(self.draft, self.target, torch.tensor([prompt]), options)]
        answered = accumulate(map(len, committed[:-2]))  # before the second step, the third, ...
        # The first step is the prompt's; the last is cut where the answer ends.
        steps = list(zip(answered, map(len, committed[1:-1]), strict=True))
        return [token for tokens in committed for token in tokens], steps


def conversation(models: Models, questions: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """All that was said up to the last question, and the answer to it."""
    text, answer = list[int](), list[int]()
    for question in questions:
        text = text + answer + question
        answer, _ = models.answer(text, window=None)
    return text, answer


def next_turns(first: list[int], answer: list[int], other: list[int]) -> dict[str, tuple[list[int], int]]:
    """Kinds of prompt, and how much of each is found in the cache."""
    cut = first + answer[: len(answer) // 2]
    return {"another question": (first + answer + other, len(first) + len(answer))} | {
        f"the rest, {n} read again": (cut, len(cut) - n) for n in READ_AGAIN if n < len(cut)
    }


def measure(name: str, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    pair = PAIRS[name]
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    models = Models(target, DraftModel.from_pretrained(pair.draft, dtype=torch.float32))
    n_questions, window = options.turns + 1, options.window
    prompts = tokenize(held_out(n_questions * options.conversations, seed=11), pair.target, thinking=False)
    conversations = [prompts[i : i + n_questions] for i in range(0, len(prompts), n_questions)]
    steps: dict[tuple[str, str], Steps] = {}
    for *before, other in track(conversations, name, console=console):
        first, answer = conversation(models, before)
        if len(answer) < SHORTEST:
            continue
        for kind, (prompt, n_found) in next_turns(first, answer, other).items():
            ways = {
                "no window": models.answer(prompt, window=None),
                "window": models.answer(prompt, window=window),
                "window, nothing of the hit": models.answer(prompt, window=window, n_unseen=n_found),
            }
            assert len({tuple(tokens) for tokens, _ in ways.values()}) == 1, "a draft changed the text"
            for way, (_, its_steps) in ways.items():
                steps.setdefault((kind, way), []).extend(its_steps)
    return [
        {
            "pair": name, "next_turn": kind, "draft_sees": way, "n_steps": len(its_steps),
            "committed_per_step": fmean(n for _, n in its_steps), "by_tokens_answered": by_stretch(its_steps),
        }
        for (kind, way), its_steps in steps.items()
    ]  # fmt: skip


def by_stretch(steps: Steps) -> dict[str, float]:
    """Tokens committed per step that began in each stretch of the answer."""
    ends = (*STRETCHES[1:], ANSWER)
    committed = {
        f"{start}-{end - 1}": [n for at, n in steps if start <= at < end]
        for start, end in zip(STRETCHES, ends, strict=True)
    }
    return {stretch: fmean(counts) for stretch, counts in committed.items() if counts}


def table(rows: list[dict[str, Any]]) -> Table:
    stretches = list(rows[0]["by_tokens_answered"])
    shown = Table(title="tokens committed per step, by tokens of the answer before the step")
    for name in ("pair", "next turn", "the draft sees"):
        shown.add_column(name)
    for name in (*stretches, "all", "steps"):
        shown.add_column(name, justify="right")
    for row in rows:
        curve = (f"{row['by_tokens_answered'].get(stretch, float('nan')):.2f}" for stretch in stretches)
        shown.add_row(
            row["pair"], row["next_turn"], row["draft_sees"], *curve, f"{row['committed_per_step']:.2f}",
            str(row["n_steps"]),
        )  # fmt: skip
    return shown


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.measure_hits", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--turns", type=int, default=1, help="questions answered before the drafts are compared (1)")
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument(
        "--output", type=Path, help="the JSON file (launch/results/<date>-<machine>-<commit>-hits.json)"
    )
    options = parser.parse_args(arguments)
    console = Console(width=140)
    rows = [row for name in options.pairs for row in measure(name, options, console)]
    console.print(table(rows))
    command = shlex.join(["python", "-m", "launch.measure_hits", *arguments])
    document = head("hits", command) | {"window": options.window, "rows": rows}
    print(write(document, options.output or tiny.RESULTS / file_name("hits")))


if __name__ == "__main__":
    main()
