"""Batched generation of training text: greedy answers must equal those of Transformers' own `generate`."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sglang_dflash.model.target import stop_token_ids
from sglang_dflash.tiny.pairs import DENSE, HYBRID
from sglang_dflash.train import answers, prompts
from sglang_dflash.train.from_model import ModelSource
from sglang_dflash.train.generation import Prompt, generate

LIMIT = 20
QUESTIONS = ("Hi.", "Count from three to nine, please.", "Say yes.", "Count down from twelve to two, and then stop.")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DENSE.target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def source(target) -> ModelSource:
    return ModelSource(target, AutoTokenizer.from_pretrained(DENSE.target), at_once=3)


def line(text: str) -> answers.Line:
    return {"messages": [{"role": "user", "content": text}]}


def test_greedy_rows_equal_transformers_own(target, source):
    asked = [Prompt(source.ids_of(line(text))) for text in QUESTIONS]
    found = {
        row.prompt: row for row in generate(target, asked, stop_ids=source.stop_ids, limit=LIMIT, at_once=3, seed=0)
    }
    assert sorted(found) == [0, 1, 2, 3]
    assert len({row.stopped for row in found.values()}) == 2, "both ends occur"
    for i, prompt in enumerate(asked):
        ids = torch.tensor([prompt.ids])
        alone = (
            AutoModelForCausalLM.from_pretrained(DENSE.target, dtype=torch.float32)
            .generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False)[
                0, len(prompt.ids) :
            ]
            .tolist()
        )
        stopped = alone[-1] in stop_token_ids(target)
        assert found[i] == (i, alone[:-1] if stopped else alone, stopped)


def test_rows_of_a_temperature_differ_by_seed(target, source):
    asked = [Prompt(source.ids_of(line(text)), 2.0) for text in QUESTIONS]
    runs = [
        {row.prompt: row.ids for row in generate(target, asked, stop_ids=set(), limit=8, at_once=4, seed=seed)}
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_answers_are_written_once(source, tmp_path: Path):
    out, asked = tmp_path / "answers.jsonl", [line(text) for text in QUESTIONS]
    sampling = answers.Sampling(max_tokens=LIMIT)
    assert answers.write_answers(source, asked[:2], out, sampling) == 2
    assert answers.write_answers(source, asked, out, sampling) == 2
    rows = [json.loads(text)["messages"] for text in out.read_text().splitlines()]
    assert sorted(row[0]["content"] for row in rows) == sorted(QUESTIONS)
    assert all(row[1]["role"] == "assistant" and row[1]["content"].strip() for row in rows)


def test_user_turns_start_with_an_opening(source):
    found = [turn["content"] for (turn,) in prompts.user_turns(source, source.tokenizer, 30, 0)]
    assert found
    assert all(8 <= len(text) <= 400 for text in found)


def test_a_server_is_asked_for_where_text_is_parsed_or_layers_are_recurrent(source):
    with pytest.raises(ValueError, match="give --server"):
        source.ids_of(line("Hi.") | {"tools": [{"type": "function", "function": {"name": "f"}}]})
    hybrid = AutoModelForCausalLM.from_pretrained(HYBRID.target)
    with pytest.raises(ValueError, match=r"other than full attention \(Linear.*; serve it and give --server"):
        ModelSource(hybrid, source.tokenizer, at_once=1)
