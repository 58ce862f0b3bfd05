"""What the width benchmark asks: texts whose drafts are accepted often, less often, and hardly ever."""

import argparse
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from launch import tiny
from launch.bench_serve import tokenize
from sglang_dflash.bench.prompts import asked, held_out

HARD_CONCURRENCY = (1, 8)
# Prompts of a run: enough that its requests' starts and ends, when few run, weigh little.
LEAST, PER_PLACE = 16, 4
HARD = "everyday questions in English, of which the tiny corpus has none"
ASKED = (
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "What are three common mistakes people make with {}?",
    "Why does {} matter, and to whom?",
)
ABOUT = (
    *("the sea", "quantum entanglement", "sourdough bread", "the French Revolution", "vaccines", "chess openings"),
    *("tax law", "jazz", "photosynthesis", "bicycle repair", "black holes", "learning to swim"),
)
HOPELESS = "random tokens, no chat template; answers of 48 tokens, past their end"
HOPELESS_TOKENS = 32  # of a prompt
HOPELESS_SAMPLING = {"max_new_tokens": 48, "ignore_eos": True}
WORDS = range(300, 1000)  # token ids that are text, none of them special


class Workload(NamedTuple):
    name: str
    source: str
    prompts: list[list[int]]
    sampling: Mapping[str, Any]
    concurrency: Sequence[int]

    def at(self, concurrency: int) -> list[list[int]]:
        return self.prompts[: max(LEAST, PER_PLACE * concurrency)]


def hard_questions(n: int) -> list[str]:
    return [question.format(subject) for subject in ABOUT for question in ASKED][:n]


def hopeless_prompts(n: int, seed: int = 42) -> list[list[int]]:
    random = Random(seed)
    return [random.choices(WORDS, k=HOPELESS_TOKENS) for _ in range(n)]


def make_workloads(options: argparse.Namespace) -> list[Workload]:
    n = options.num_prompts
    n_hard = min(n, PER_PLACE * max(HARD_CONCURRENCY))
    easy = tokenize(held_out(n), tiny.HYBRID.target, thinking=True)
    hard = tokenize([asked(question) for question in hard_questions(n_hard)], tiny.HYBRID.target, thinking=True)
    answer = {"max_new_tokens": options.max_new_tokens}
    return [
        Workload("easy", "held-out questions of the tiny corpus", easy, answer, options.concurrency),
        Workload("hard", HARD, hard, answer, HARD_CONCURRENCY),
        Workload("hopeless", HOPELESS, hopeless_prompts(n_hard), HOPELESS_SAMPLING, HARD_CONCURRENCY),
    ]
