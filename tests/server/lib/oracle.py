"""Expected tokens of an answer from Transformers, and expected steps from the PyTorch reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AutoModelForCausalLM

from sglang_dflash.pairs.servers.server import Generation
from sglang_dflash.pairs.tiny.pairs import Pair
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.generate import Options, accepted_at, spec_steps
from sglang_dflash.reference.torch.target import stop_token_ids
from tests.server.lib.talk import steps, tokens_of


class Oracle:
    def __init__(self, pair: Pair, block_size: int | None, draft_window: int | None, page_size: int = 1) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
        self.draft = DraftModel.from_pretrained(pair.draft, dtype=torch.float32)
        self.block_size, self.draft_window, self.page_size = block_size, draft_window, page_size

    def continuation(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Return the continuation by Transformers' own `generate`."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
            )
        return out[0, len(prompt) :].tolist()

    def accepted_histogram(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        n_unseen: int = 0,
        *,
        copies: bool = False,
        width: int | None = None,
    ) -> dict[int, int]:
        """Return n -> number of decode steps that accept n drafts. The prefill does not count."""
        options = Options(
            max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids(self.target), block_size=self.block_size,
            draft_window=self.draft_window, page_size=self.page_size, n_unseen=n_unseen, copies=copies, width=width,
        )  # fmt: skip
        _, *steps = spec_steps(self.draft, self.target, torch.tensor([prompt]), options)
        return dict(Counter(step.n_accepted for step in steps))

    def expect(self, prompts: list[list[int]], max_new_tokens: int) -> Expected:
        token_ids = [self.continuation(prompt, max_new_tokens) for prompt in prompts]
        steps = [self.accepted_histogram(prompt, max_new_tokens) for prompt in prompts]
        return Expected(prompts, max_new_tokens, token_ids, steps)

    def accepted_at(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        return accepted_at(
            self.draft, self.target, prompt, answer, block_size=self.block_size, draft_window=self.draft_window
        )


@cache
def oracle(pair: Pair, block_size: int | None, draft_window: int | None, page_size: int = 1) -> Oracle:
    return Oracle(pair, block_size, draft_window, page_size)


class Asked(Protocol):
    def generate_many(self, prompts: list[list[int]], *, concurrency: int, **sampling: Any) -> list[Generation]: ...


class Expected(NamedTuple):
    prompts: list[list[int]]
    max_new_tokens: int
    token_ids: list[list[int]]  # Transformers' continuations
    steps: list[dict[int, int]]  # number of accepted drafts -> number of decode steps

    def require_from(self, server: Asked, concurrency: int) -> list[Generation]:
        """Send the prompts to the server, require these tokens and steps, and return the answers."""
        answers = server.generate_many(self.prompts, concurrency=concurrency, max_new_tokens=self.max_new_tokens)
        assert tokens_of(answers) == self.token_ids
        assert [steps(answer) for answer in answers] == self.steps
        return answers
