"""Acceptance measured in training must equal that of generation by `spec_steps`."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import sglang_dflash
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.generate import Options, spec_steps
from sglang_dflash.reference.torch.target import stop_token_ids
from sglang_dflash.train import evaluation
from sglang_dflash.train.evaluation import Answers, acceptance, n_agreeing
from sglang_dflash.train.features import read_rows
from sglang_dflash.train.tiny_pair import END, held_out_prompts, make_tokenizer
from sglang_dflash.train.tokens import Rows
from sglang_dflash.train.writer import writer_for

ASSETS = Path(sglang_dflash.__file__).parent / "assets"


def test_counts_by_hand():
    """Four steps accepted 3, 1, 0 and 1 of three drafts. So 4, 3, 1, 1 steps accepted at least 0, 1, 2, 3 drafts."""
    assert acceptance(torch.tensor([4, 3, 1, 1])) == (1 + 5 / 4, [3 / 4, 1 / 4, 1 / 4])
    assert acceptance(torch.zeros(3, dtype=torch.int64)) == (1, [0, 0])


def by_generation(draft, target, prompts: list[list[int]], options: Options) -> list[int]:
    """Return the number of steps that accepted at least n drafts, counted in speculative generation."""
    steps = [step for ids in prompts for step in [*spec_steps(draft, target, torch.tensor([ids]), options)][1:]]
    return [sum(step.n_accepted >= n for step in steps) for n in range(draft.config.block_size)]


def load(pair: str, draft: str) -> tuple[DraftModel, PreTrainedModel]:
    target = AutoModelForCausalLM.from_pretrained(ASSETS / pair / "target", dtype=torch.float32)
    return DraftModel.from_pretrained(ASSETS / pair / draft, dtype=torch.float32), target


@pytest.mark.parametrize("pair", ["tiny_dense", "tiny"])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 70])
def test_acceptance_equals_that_of_generation(pair, max_new_tokens):
    """Some answers end at a stop token, and the others at the limit. Both may be inside a step."""
    draft, target = load(pair, "draft")
    prompts = [prompt[0].tolist() for _, prompt in held_out_prompts(make_tokenizer(), 1)][:6]
    answers = Answers(target, prompts, max_new_tokens)
    options = Options(max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids(target))
    found = answers.n_surviving(draft).tolist()
    assert found == by_generation(draft, target, prompts, options)
    if max_new_tokens == 70:
        assert len({answer.n == 70 for answer in answers.written}) == 2, "both ends occur"
        assert answers.acceptance(draft).tokens_per_step > 2
        assert answers.acceptance(draft) == acceptance(torch.tensor(found))


def test_answers_measure_several_drafts(monkeypatch):
    """The target writes and reads the answers once, also if they are measured in several parts."""
    written, read = [], []
    pair = load("tiny_dense", "draft")
    drafts = [pair[0], load("tiny_dense", "draft2")[0]]
    prompts = [prompt[0].tolist() for _, prompt in held_out_prompts(make_tokenizer(), 1)][:2]
    answers, options = Answers(pair[1], prompts, 30), Options(max_new_tokens=30, stop_token_ids=(END,))
    whole = [answers.n_surviving(draft).tolist() for draft in drafts]
    assert whole == [by_generation(draft, pair[1], prompts, options) for draft in drafts]
    assert whole[0] != whole[1]
    monkeypatch.setattr(evaluation, "writer_for", lambda *args: written.append(args) or writer_for(*args))
    monkeypatch.setattr(evaluation, "read_rows", lambda *args: read.append(args) or read_rows(*args))
    monkeypatch.setattr(evaluation, "slots_at_once", lambda head: 48)
    assert [answers.n_surviving(draft).tolist() for draft in drafts] == whole
    assert (written, read) == ([], [])
    again = Answers(pair[1], prompts, 30)
    assert [again.n_surviving(draft).tolist() for draft in drafts] == whole
    assert (len(written), len(read)) == (1, 2)


def test_larger_blocks_than_the_answers_allow_are_refused():
    draft, target = load("tiny_dense", "draft")
    with pytest.raises(ValueError, match="has blocks of 16 tokens, and the answers allow 8; give block_size=16"):
        Answers(target, [[1]], 4, block_size=8).acceptance(draft)


def test_agreement_counts_responses_only():
    ids, is_response = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[False, True, True, False]])
    choices = torch.tensor([[6, 9, 8, 1]])  # the target agrees after 5 and 7, and chooses 9 after 6
    assert n_agreeing(Rows(ids, is_response, torch.tensor([-1])), choices).tolist() == [1, 2]


def test_stop_tokens_come_from_the_generation_config():
    target = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny_dense" / "target")
    assert stop_token_ids(target) == (END,)
    target.generation_config.eos_token_id = [2, 5]
    assert stop_token_ids(target) == (2, 5)
    target.generation_config.eos_token_id = None
    assert stop_token_ids(target) == ()
