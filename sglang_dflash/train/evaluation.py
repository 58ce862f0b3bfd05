"""How good a draft is on text it was not trained on.

Two views. On the held-out text: the loss, and how much of the text the target would have said itself; where that share
is low, the text teaches little. In generation: the target answers held-out prompts with the draft at work, step by step
as `spec_generate` does, and what it accepts is counted.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from sglang_dflash.model import DraftModel
from sglang_dflash.model.generate import Options, spec_steps
from sglang_dflash.train.tokens import Rows


class Acceptance(NamedTuple):
    """Of the target's steps in generation.

    tokens_per_step: drafts accepted and the bonus, averaged; one plus the sum of `at_slot`.
    at_slot: for slots 1..N-1, the share of steps that accepted all drafts up to this one.
    """

    tokens_per_step: float
    at_slot: list[float]


def n_surviving(
    draft: DraftModel, target: PreTrainedModel, prompts: Iterable[torch.Tensor], options: Options
) -> torch.Tensor:
    """How many steps accepted at least n drafts, for n = 0..N-1: int64 [N] on the target's device.

    prompts: int64 [1, tokens] each. The prompt's own step has no drafts and is not counted.
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
    """Response tokens that are the target's own choice there, and response tokens: int64 [2]."""
    asked_RL = rows.is_response_RL[:, 1:]
    agrees_RL = (choices_RL[:, :-1] == rows.ids_RL[:, 1:]) & asked_RL
    return torch.stack([agrees_RL.sum(), asked_RL.sum()])
