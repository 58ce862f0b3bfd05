"""Checks of an answer's hidden states and log-probabilities against Transformers in fp32."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_dflash.pairs.servers.server import Generation
from tests.server.lib.talk import logprobs_of
from tests.tools.parameters import chosen_from

GAP = 1e-4  # largest allowed difference of values near 1; fp32 sums are taken in another order


def require_rows(target: Path, prompt: Sequence[int], answer: Generation, n_missing: int = 0) -> None:
    """Require for each answer token the hidden state from which it was chosen, except for the first `n_missing`."""
    found = chosen_from(answer.meta["hidden_states"])
    n_tokens = len(answer.token_ids)
    assert n_tokens == answer.meta["completion_tokens"]
    assert n_tokens - len(found) == n_missing, f"{len(found)} rows for {n_tokens} tokens"
    ids = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
    with torch.inference_mode():
        wanted_TH = model(target).base_model(ids).last_hidden_state[0, len(prompt) - 1 + n_missing :]
    torch.testing.assert_close(torch.tensor(found), wanted_TH, atol=GAP, rtol=GAP)


def require_logprobs(target: Path, prompt: Sequence[int], answer: Generation) -> None:
    """Require that the log-probabilities of an answer's tokens equal Transformers'. Wrong K/V would change them."""
    found = torch.tensor(logprobs_of(answer))
    ids = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
    with torch.inference_mode():
        logprobs_TV = model(target)(ids).logits[0, len(prompt) - 1 :].log_softmax(dim=-1)
    wanted_T = logprobs_TV.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(found, wanted_T, rtol=0, atol=1e-3)


@cache
def model(target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
