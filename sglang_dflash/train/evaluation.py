"""Evaluation of a draft on text on which it was not trained.

Two numbers are measured on held-out text: the loss, and the share of response tokens that the target itself would
choose. If this share is low, a draft learns little from the text. Acceptance is measured in generation: the target
answers held-out prompts speculatively, as in `spec_generate`, and accepted drafts are counted.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from sglang_dflash.model import DraftModel
from sglang_dflash.model.generate import Options, spec_steps
from sglang_dflash.train.tokens import Rows


class Acceptance(NamedTuple):
    """Acceptance over the decode steps of a generation."""

    tokens_per_step: float  # acceptance length, including the bonus: one plus the sum of `at_slot`
    at_slot: list[float]  # for slots 1..N-1: share of steps that accepted all drafts up to the slot


def n_surviving(
    draft: DraftModel, target: PreTrainedModel, prompts: Iterable[torch.Tensor], options: Options
) -> torch.Tensor:
    """Return the number of steps that accepted at least n drafts, for n = 0..N-1: int64 [N], on the target's device.

    Args:
        prompts: int64 [1, tokens] each. The step that reads the prompt has no drafts and is not counted. Drafts
            accepted after a stop token are counted.
    """
    N = options.block_size or draft.config.block_size
    count_N = torch.zeros(N, dtype=torch.int64, device=target.device)
    for prompt in prompts:
        _, *steps = spec_steps(draft, target, prompt.to(target.device), options)
        for step in steps:
            count_N[: step.n_accepted + 1] += 1
    return count_N


def acceptance(n_surviving_N: torch.Tensor) -> Acceptance:
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
