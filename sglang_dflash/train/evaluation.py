"""Evaluation of a draft on text on which it was not trained.

Two numbers are measured on held-out text: the loss, and the share of response tokens that the target itself would
choose. If this share is low, a draft learns little from the text. Acceptance is measured on the target's greedy answers
to held-out prompts. They do not depend on the draft, so the target writes and reads them once.
"""

from collections.abc import Sequence
from functools import cached_property
from random import Random
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.draft import Begin
from sglang_dflash.reference.torch.generate import draft_logits
from sglang_dflash.reference.torch.target import stop_token_ids
from sglang_dflash.train.features import read_rows
from sglang_dflash.train.objective import head_of, slots_at_once
from sglang_dflash.train.tokens import Rows
from sglang_dflash.train.writer import Asked, writer_for

AT_ONCE = 64  # prompts that the target answers at once


class Acceptance(NamedTuple):
    """Acceptance over the decode steps of a generation."""

    tokens_per_step: float  # acceptance length, including the bonus: one plus the sum of `at_slot`
    at_slot: list[float]  # for slots 1..N-1: share of steps that accepted all drafts up to the slot


class Answer(NamedTuple):
    """Prompt with the target's greedy answer. More tokens follow its end, to check drafts of its last blocks."""

    ids: list[int]
    first: int  # index of the answer's first token
    n: int  # number of the answer's tokens, up to and including the first stop token


class Answers:
    """Greedy answers of a target to prompts. They are written at the first use, and measure any number of drafts.

        answers = Answers(target, prompts, max_new_tokens=256)
        length, at_slot = answers.acceptance(draft)

    Args:
        prompts: token ids.
        block_size: largest block of the drafts.
    """

    def __init__(
        self, target: PreTrainedModel, prompts: Sequence[list[int]], max_new_tokens: int, block_size: int = 16
    ) -> None:
        self.target = target
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.block_size = block_size
        self.read: dict[tuple[int, ...], list[torch.Tensor]] = {}  # features by layers

    @cached_property
    def written(self) -> list[Answer]:
        """Return the answers. The target writes them at the first access."""
        limit, stops = self.max_new_tokens + self.block_size, stop_token_ids(self.target)
        asked = Asked(self.prompts, [0.0] * len(self.prompts), limit, stop_ids=())
        found = []
        for prompt, ids, _ in sorted(writer_for(self.target, AT_ONCE).write(asked, Random(0))):
            n = next((i + 1 for i, token in enumerate(ids) if token in stops), limit)
            found.append(Answer(self.prompts[prompt] + ids, len(self.prompts[prompt]), min(n, self.max_new_tokens)))
        return found

    def features(self, layer_ids: tuple[int, ...]) -> list[torch.Tensor]:
        """Return each answer's features, [1, tokens, C]. The first call with these layers computes them."""
        if layer_ids not in self.read:
            ids = (torch.tensor([answer.ids], device=self.target.device) for answer in self.written)
            rows = (Rows(ids_RL, torch.ones_like(ids_RL, dtype=torch.bool), torch.tensor([-1])) for ids_RL in ids)
            self.read[layer_ids] = [read_rows(self.target, row, layer_ids)[1] for row in rows]
        return self.read[layer_ids]

    def acceptance(self, draft: DraftModel) -> Acceptance:
        """Return a draft's acceptance in all decode steps of these answers."""
        return acceptance(self.n_surviving(draft))

    @torch.inference_mode()
    def n_surviving(self, draft: DraftModel) -> torch.Tensor:
        """Count the steps that accepted at least n drafts, for n = 0..N-1: int64 [N], on the target's device.

        The steps are those of `spec_steps`. The one that reads the prompt has no drafts and is not counted. Drafts
        accepted after the answer's end are counted.

        Raises:
            ValueError: the draft's blocks are larger than `block_size`.
        """
        N = draft.config.n_drafts + 1
        if self.block_size < N:
            raise ValueError(
                f"the draft has blocks of {N} tokens, and the answers allow {self.block_size}; give block_size={N}"
            )
        count_N = [0] * N
        for answer, features_1TC in zip(self.written, self.features(draft.config.target_layer_ids), strict=True):
            accepted_A, at = self.accepted(draft, answer, features_1TC), 0
            while at < len(accepted_A):
                for n in range(accepted_A[at] + 1):
                    count_N[n] += 1
                at += accepted_A[at] + 1
        return torch.tensor(count_N, device=self.target.device)

    def accepted(self, draft: DraftModel, answer: Answer, features_1TC: torch.Tensor) -> list[int]:
        """Return the number of accepted drafts of a block anchored at each token of the answer but the last."""
        N, D, device = draft.config.block_size, draft.config.n_drafts, features_1TC.device
        text = torch.tensor(answer.ids, device=device)
        context = draft.context_kv(features_1TC.to(draft.dtype))
        found: list[int] = []
        end, n_blocks = answer.first + answer.n - 1, max(1, slots_at_once(head_of(self.target)) // N)
        for at in range(answer.first, end, n_blocks):
            at_A = torch.arange(at, min(at + n_blocks, end), device=device)
            tokens_AN = torch.full((len(at_A), N), draft.config.mask_token_id, device=device)
            tokens_AN[:, 0] = text[at_A]
            embeddings_ANH = draft.embeddings(tokens_AN, self.target.get_input_embeddings())
            hidden_ADH = draft.predicting(draft(embeddings_ANH[None], context, at_A[None])[0])
            logits_ADV, embed = draft_logits(hidden_ADH, self.target), self.target.get_input_embeddings()
            guesses_AD = draft.guesses(hidden_ADH, logits_ADV, Begin.at(text[at_A], context, at_A), embed)
            is_right_AD = guesses_AD == text[at_A[:, None] + torch.arange(1, D + 1, device=device)]
            found += is_right_AD.long().cumprod(-1).sum(-1).tolist()
        return found


def acceptance(n_surviving_N: torch.Tensor) -> Acceptance:
    """Return the acceptance for the counts of `Answers.n_surviving`."""
    n_steps, *accepted = n_surviving_N.tolist()
    at_slot = [n / max(1, n_steps) for n in accepted]
    return Acceptance(1 + sum(at_slot), at_slot)


def n_agreeing(rows: Rows, choices_RL: torch.Tensor) -> torch.Tensor:
    """Count the response tokens that equal the target's argmax, and all response tokens: int64 [2].

    The first token of a row is not counted.
    """
    asked_RL = rows.is_response_RL[:, 1:]
    agrees_RL = (choices_RL[:, :-1] == rows.ids_RL[:, 1:]) & asked_RL
    return torch.stack([agrees_RL.sum(), asked_RL.sum()])
