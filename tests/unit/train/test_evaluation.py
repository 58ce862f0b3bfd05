"""Acceptance measured in training must equal that of generation by `spec_steps`."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import sglang_dflash
from sglang_dflash.model import DraftModel
from sglang_dflash.model.generate import Options, spec_steps
from sglang_dflash.model.target import stop_token_ids
from sglang_dflash.train.evaluation import acceptance, n_agreeing, n_surviving
from sglang_dflash.train.tiny_pair import END, held_out_prompts, make_tokenizer
from sglang_dflash.train.tokens import Rows

DENSE = Path(sglang_dflash.__file__).parent / "assets" / "tiny_dense"


def test_counts_by_hand():
    """Four steps accepted 3, 1, 0 and 1 of three drafts. So 4, 3, 1, 1 steps accepted at least 0, 1, 2, 3 drafts."""
    assert acceptance(torch.tensor([4, 3, 1, 1])) == (1 + 5 / 4, [3 / 4, 1 / 4, 1 / 4])
    assert acceptance(torch.zeros(3, dtype=torch.int64)) == (1, [0, 0])


def test_acceptance_equals_that_of_generation():
    target = AutoModelForCausalLM.from_pretrained(DENSE / "target", dtype=torch.float32)
    draft = DraftModel.from_pretrained(DENSE / "draft", dtype=torch.float32)
    prompts = [prompt for _, prompt in held_out_prompts(make_tokenizer(), 1)][:4]
    options = Options(max_new_tokens=40, stop_token_ids=stop_token_ids(target))
    counted = acceptance(n_surviving(draft, target, prompts, options))
    n_accepted = [step.n_accepted for prompt in prompts for step in [*spec_steps(draft, target, prompt, options)][1:]]
    assert counted.tokens_per_step == pytest.approx(sum(n + 1 for n in n_accepted) / len(n_accepted))
    assert counted.tokens_per_step > 2
    for slot, share in enumerate(counted.at_slot, start=1):
        assert share == pytest.approx(sum(n >= slot for n in n_accepted) / len(n_accepted))


def test_agreement_counts_responses_only():
    ids, is_response = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[False, True, True, False]])
    choices = torch.tensor([[6, 9, 8, 1]])  # the target agrees after 5 and 7, and chooses 9 after 6
    assert n_agreeing(Rows(ids, is_response, torch.tensor([-1])), choices).tolist() == [1, 2]


def test_stop_tokens_come_from_the_generation_config():
    target = AutoModelForCausalLM.from_pretrained(DENSE / "target")
    assert stop_token_ids(target) == (END,)
    target.generation_config.eos_token_id = [2, 5]
    assert stop_token_ids(target) == (2, 5)
    target.generation_config.eos_token_id = None
    assert stop_token_ids(target) == ()
