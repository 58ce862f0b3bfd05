"""Training text from a target in this process: greedy answers of a batch equal those of single prompts."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.pairs.tiny.pairs import DENSE
from sglang_dflash.train import answers, prompts
from sglang_dflash.train.from_model import ModelSource

LIMIT = 20
QUESTIONS = ("Hi.", "Count from three to nine, please.", "Say yes.", "Count down from twelve to two, and then stop.")


@pytest.fixture(scope="module")
def source() -> ModelSource:
    target = AutoModelForCausalLM.from_pretrained(DENSE.target, dtype=torch.float32).eval()
    return ModelSource(target, AutoTokenizer.from_pretrained(DENSE.target), at_once=3)


def line(text: str) -> answers.Line:
    return {"messages": [{"role": "user", "content": text}]}


def test_greedy_rows_equal_single_prompts(source):
    asked = [source.ids_of(line(text)) for text in QUESTIONS]
    found = {row.prompt: row for row in source.generate(asked, [0.0] * 4, LIMIT, source.stop_ids, 0)}
    assert sorted(found) == [0, 1, 2, 3]
    assert len({row.stopped for row in found.values()}) == 2, "both ends occur"
    for i, prompt in enumerate(asked):
        (alone,) = source.generate([prompt], [0.0], LIMIT, source.stop_ids, 0)
        assert (found[i].ids, found[i].stopped) == (alone.ids, alone.stopped)
        assert len(alone.ids) == LIMIT or alone.stopped


def test_temperatures_of_a_mix_are_kept_apart(source):
    """Greedy rows do not depend on the seed. Sampled rows do."""
    asked = [source.ids_of(line(text)) for text in QUESTIONS]
    runs = [
        {row.prompt: row.ids for row in source.generate(asked, [0.0, 2.0, 0.0, 2.0], 8, set(), seed)}
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1]
    assert [runs[0][i] == runs[2][i] for i in range(4)] == [True, False, True, False]


def test_answers_are_written_once(source, tmp_path: Path):
    out, asked = tmp_path / "answers.jsonl", [line(text) for text in QUESTIONS]
    sampling = answers.Sampling(max_tokens=LIMIT)
    assert answers.write_answers(source, asked[:2], out, sampling) == 2
    assert answers.write_answers(source, asked, out, sampling) == 2
    rows = [json.loads(text)["messages"] for text in out.read_text().splitlines()]
    assert sorted(row[0]["content"] for row in rows) == sorted(QUESTIONS)
    assert all(row[1]["role"] == "assistant" and row[1]["content"].strip() for row in rows)


def test_user_turns_have_8_to_400_characters(source):
    found = []
    prompts.user_turns(source, source.tokenizer, 30, 0, found.append)
    assert found
    assert all(8 <= len(turn["content"]) <= 400 for (turn,) in found)


@pytest.mark.parametrize(
    ("template", "reason"),
    [(None, "has no chat template"), ("{{ messages[0].content }}", "marks no end of a user turn")],
)
def test_user_turns_need_a_template_that_ends_them(source, template, reason):
    tokenizer = AutoTokenizer.from_pretrained(DENSE.target)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"{reason}.*; give --turns 0"):
        prompts.user_turns(source, tokenizer, 1, 0, print)


def test_a_server_is_asked_for_where_text_is_parsed(source):
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(
        ValueError, match=r"tool calls \(the line has tools\), which .*; serve the target with --reasoning-parser"
    ):
        source.ids_of(line("Hi.") | {"tools": tools})
    with pytest.raises(ValueError, match="no single token; serve the target and give --server"):
        source.user_turns([("", "Hi")], "a stop text", 0, print)


def test_a_prompt_that_the_template_rejects_is_named(source):
    tokenizer = AutoTokenizer.from_pretrained(DENSE.target)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    strict = ModelSource(source.target, tokenizer, 3)
    with pytest.raises(ValueError, match=r"prompt 2: the chat template rejects the messages \(roles must alternate"):
        strict.answer([(1, line("Hi."))], answers.Sampling(), print)
