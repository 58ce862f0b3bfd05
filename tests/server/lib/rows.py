"""What Transformers, in fp32, chose each token of an answer from: the row of its last hidden states, after the norm."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from launch.parameters import chosen_from
from sglang_dflash.bench.server import Generation

GAP = 1e-4  # of fp32 sums in another order; the values are about 1


def require_rows(target: Path, prompt: Sequence[int], answer: Generation) -> None:
    """One row for each token of the answer, the one that it was chosen from."""
    found = chosen_from(answer.meta["hidden_states"])
    assert len(found) == len(answer.token_ids) == answer.meta["completion_tokens"]
    ids = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
    with torch.inference_mode():
        wanted_TH = model(target)(ids).last_hidden_state[0, len(prompt) - 1 :]
    torch.testing.assert_close(torch.tensor(found), wanted_TH, atol=GAP, rtol=GAP)


@cache
def model(target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().base_model
