"""Greedy answers from Transformers whose logits are edited, for example by penalties."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tests.fixtures.sequential import penalised
from tests.server.conftest import PAIRS
from tests.server.lib.rows import model

# Strong enough to change most answers of the tiny pairs, whose next tokens are nearly certain.
ASKED: list[dict[str, float]] = [
    {"frequency_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 2.0},
    {"frequency_penalty": -2.0, "repetition_penalty": 0.5},
    {"min_new_tokens": 36},
    {"frequency_penalty": 1.5, "presence_penalty": 1.5, "repetition_penalty": 1.5, "min_new_tokens": 36},
]
Rule = Callable[[list[int], torch.Tensor], torch.Tensor]


def edited_answer(prompt: Sequence[int], rule: Rule, target: str, max_new_tokens: int) -> list[int]:
    """Return greedy tokens if `rule(output, logits_V)` changes Transformers' logits; `target`: name in `PAIRS`."""

    def process(ids_1T: torch.Tensor, logits_1V: torch.Tensor) -> torch.Tensor:
        return rule(ids_1T[0, len(prompt) :].tolist(), logits_1V[0])[None]

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model(PAIRS[target].target).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
            logits_processor=[process],
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def penalty_rule(asked: Mapping[str, Any], end: int) -> Rule:
    return lambda text, logits_V: torch.tensor(penalised(logits_V, text, asked, stops=[end]))


def end_token(target: str) -> int:
    return model(PAIRS[target].target).generation_config.eos_token_id
