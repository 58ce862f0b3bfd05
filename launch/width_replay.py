"""The width policy on the tiny pair's own texts: tokens per second over those of the best fixed width.

    python -m launch.width_replay [--texts texts.json]

Level P: computed, nothing is served. The pair answers in plain torch, and how many drafts a step would accept is read
off at every place of every answer. Then steps go through what serves, `sglang_dflash.width`: requests come and go,
outcomes arrive a step late, steps take what a server's took, with a jitter, and launch was wrong about that. Prompts
are read in between; their time is no part of the rate. Prints a Markdown table.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from sglang_dflash.bench.prompts import asked, held_out, tokenize
from sglang_dflash.model import DraftModel
from sglang_dflash.model.generate import Options, accepted_at, spec_steps
from sglang_dflash.model.target import stop_token_ids
from sglang_dflash.tiny import pairs as tiny
from sglang_dflash.tiny.workloads import HOPELESS_ANSWER, hard_questions, hopeless_prompts
from sglang_dflash.width.chooser import DEFAULT, Chooser
from sglang_dflash.width.cost import StepCost
from sglang_dflash.width.policy import Adaptive, Policy

BLOCK = 16
WIDTHS = (*DEFAULT, BLOCK)
FIXED = (1, 4, 8, BLOCK)
# By requests, at `FIXED` widths: medians of launch/results/2026-11-22-cpu-2core-c21d33a6e-width.json.
STEP_MS = {1: (4.75, 9.37, 10.40, 11.12), 4: (5.98, 12.87, 15.22, 17.20), 16: (8.92, 22.99, 26.58, 31.38)}
PROMPT_S = 0.05
JITTER, DISTURBED = 0.05, 0.01  # standard deviation of a step's time; share of the steps that take twice as long
WORKLOADS = {  # the kind of text of one request after the other, over and over
    **{kind: (kind,) for kind in ("easy", "hard", "hopeless")},
    "mixed": ("easy", "hard", "hopeless"),
    "changing": (*("easy",) * 24, *("hopeless",) * 24, *("easy",) * 24, *("hard",) * 24),
}
LAUNCH_SAW = 0.85  # of what steps take at every width; of one width it was wrong by `--launch-error`

Texts = Mapping[str, Sequence[Sequence[int]]]  # by kind: of every answer, at every place, the drafts a step accepts


class Request(Protocol):
    rid: str

    def step(self, width: int) -> tuple[int, float]: ...  # drafts it accepts now, and tokens that this counts for
    def is_done(self) -> bool: ...


class Answer:
    def __init__(self, rid: str, accepted: Sequence[int]) -> None:
        self.rid, self.accepted, self.place = rid, accepted, 0

    def step(self, width: int) -> tuple[int, float]:
        n_accepted = min(self.accepted[self.place], width - 1)
        self.place += n_accepted + 1
        return n_accepted, n_accepted + 1

    def is_done(self) -> bool:
        return self.place >= len(self.accepted) - 1


class Run(NamedTuple):
    """What was chosen, step by step, and what came of it."""

    widths: list[int]
    tokens: float
    seconds: float


def pooled(runs: Sequence[Run]) -> float:
    """Tokens per second over all of them."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def shares(runs: Sequence[Run]) -> dict[str, float]:
    """Of steps, by width."""
    widths = Counter(width for run in runs for width in run.widths)
    return {str(width): round(n / widths.total(), 4) for width, n in sorted(widths.items())}


def mostly(widths: Mapping[str, float]) -> str:
    """The widths of at least a twentieth of the steps."""
    return ", ".join(f"{width}: {share:.0%}" for width, share in widths.items() if share >= 0.05)


def replay(
    chooser: Chooser, seconds: Mapping[int, float], requests: Iterator[Request], n: int, n_tokens: int, *, seed: int
) -> Run:
    """`n` requests at a time, in steps that take `seconds` by width, until all have committed `n_tokens` together."""
    random = np.random.default_rng(seed)
    running = [next(requests) for _ in range(n)]
    widths, tokens, spent_s, now_s = list[int](), 0.0, 0.0, 0.0
    late: Sequence[int] = ()
    while tokens < n_tokens:
        width = chooser.decide([request.rid for request in running])
        if late:  # the step before is known when this one was decided
            chooser.observe(late, now_s)
        late, counted = zip(*(request.step(width) for request in running), strict=True)
        tokens += sum(counted)
        widths.append(width)
        spent_s += seconds[width]
        now_s += seconds[width] * np.exp(JITTER * random.standard_normal()) * (1 + (random.random() < DISTURBED))
        for place, request in enumerate(running):
            if request.is_done():
                running[place] = next(requests)
                chooser.interrupt()
                now_s += PROMPT_S
    return Run(widths, tokens, spent_s)


def read_texts(n: int, console: Console) -> Texts:
    """Of questions like those of the training set, of everyday ones, and of random tokens; `n` of each."""
    target = AutoModelForCausalLM.from_pretrained(tiny.HYBRID.target, dtype=torch.float32).eval()
    draft = DraftModel.from_pretrained(tiny.HYBRID.draft, dtype=torch.float32)
    answer = Options(max_new_tokens=128, stop_token_ids=stop_token_ids(target))
    hard = [asked(question) for question in hard_questions(n)]
    asks = {
        "easy": (tokenize(held_out(n), tiny.HYBRID.target, thinking=True), answer),
        "hard": (tokenize(hard, tiny.HYBRID.target, thinking=True), answer),
        "hopeless": (hopeless_prompts(n), Options(max_new_tokens=HOPELESS_ANSWER)),
    }

    def accepted(prompt: list[int], options: Options) -> list[int]:
        steps = spec_steps(draft, target, torch.tensor([prompt]), options)
        return accepted_at(draft, target, prompt, [token for step in steps for token in step.committed])

    return {
        kind: [accepted(prompt, options) for prompt in track(prompts, kind, console=console)]
        for kind, (prompts, options) in asks.items()
    }


def answers(texts: Texts, workload: str, seed: int) -> Iterator[Answer]:
    random = Random(seed)
    for number, kind in enumerate(cycle(WORKLOADS[workload])):
        yield Answer(f"{kind}-{number}", random.choice(texts[kind]))


def compare(texts: Texts, workload: str, n: int, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """The policy's rate over the best fixed width's, over all seeds, and the widths it took."""
    true_s = dict(zip(WIDTHS, np.interp(WIDTHS, FIXED, STEP_MS[n]) / 1e3, strict=True))

    def runs(chooser: Callable[[int], Chooser]) -> list[Run]:
        return [
            replay(chooser(seed), true_s, answers(texts, workload, seed), n, n * options.tokens, seed=seed)
            for seed in range(options.seeds)
        ]

    def adaptive(seed: int) -> Chooser:
        wrong_W = np.exp(options.launch_error * np.random.default_rng([seed, n]).standard_normal(len(WIDTHS)))
        launch = {n: LAUNCH_SAW * wrong_W * list(true_s.values())}
        return Chooser(Adaptive(WIDTHS, StepCost(WIDTHS, launch, lambda seconds_SW: None)))

    def fixed(width: int) -> float:
        return pooled(runs(lambda _: Chooser(Policy(f"always {width}", [width]))))

    chosen = runs(adaptive)
    return pooled(chosen) / max(map(fixed, FIXED)), shares(chosen)


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.width_replay", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=Path, help="JSON: what the texts accept, read from there or else put there")
    parser.add_argument("--num-prompts", type=int, default=48, help="texts of each kind (48)")
    parser.add_argument("--tokens", type=int, default=2500, help="of each run, per place in the batch (2500)")
    parser.add_argument("--seeds", type=int, default=4, help="runs per point (4)")
    parser.add_argument("--launch-error", type=float, default=0.03, help="standard deviation, of each width (0.03)")
    options = parser.parse_args(arguments)
    if options.texts and options.texts.exists():
        texts = json.loads(options.texts.read_text())
    else:
        texts = read_texts(options.num_prompts, Console(stderr=True))
    if options.texts:
        options.texts.write_text(json.dumps(texts))
    print("| text | requests | x best fixed width | widths |\n|---|---:|---:|---|")
    found = []
    for workload in WORKLOADS:
        for n in STEP_MS:
            ratio, widths = compare(texts, workload, n, options)
            found.append(ratio)
            print(f"| {workload} | {n} | {ratio:.3f} | {mostly(widths)} |", flush=True)
    print(f"\nmean {np.mean(found):.4f}, lowest {min(found):.3f}")


if __name__ == "__main__":
    main()
