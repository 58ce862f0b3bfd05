"""Tiny pairs of target and draft: the program that makes them, and the shipped files compared with its output."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer

import sglang_dflash
from sglang_dflash.pairs.tiny import corpus
from sglang_dflash.train import tiny_pair
from sglang_dflash.train.loop import TrainRecipe
from sglang_dflash.train.tiny_pair import load_pair, make_draft, make_pair, make_tokenizer, measure

ASSETS = Path(sglang_dflash.__file__).parent / "assets"
PAIRS = {"hybrid": ASSETS / "tiny", "dense": ASSETS / "tiny_dense"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]


@pytest.mark.parametrize("task", corpus.TASKS)
def test_the_corpus_is_deterministic_and_split_by_prompt(task):
    drawn, again = (
        [[corpus.draw(Random(seed), held_out=out, task=task) for seed in range(30)] for out in (False, True)]
        for _ in range(2)
    )
    assert drawn == again
    trained, held_out = ({exchange.prompt for exchange in part} for part in drawn)
    assert len(trained) > 5
    assert not trained & held_out


def test_a_few_answers_are_right():
    for seed in range(50):
        _, prompt, answer = corpus.draw(Random(seed), task="addition")
        digits = "".join(c if c.isdigit() else " " for c in prompt).split()
        assert answer.endswith(f"The answer is {sum(map(int, digits))}.")
        _, prompt, answer = corpus.draw(Random(seed), task="word_problem")
        start, more, gone = map(int, "".join(c if c.isdigit() else " " for c in prompt).split())
        assert answer.endswith(f"The answer is {start + more - gone}.")
        _, _, answer = corpus.draw(Random(seed), task="json_record")
        json.loads(answer.removeprefix("```json\n").removesuffix("\n```"))
        _, _, answer = corpus.draw(Random(seed), task="python_class")
        compile(answer.removeprefix("```python\n").removesuffix("\n```"), "answer", "exec")


def test_training_text_follows_the_chat_template(tokenizer):
    exchange = corpus.draw(Random(0))
    messages = [{"role": "user", "content": exchange.prompt}, {"role": "assistant", "content": exchange.answer}]
    tokens = tiny_pair.chat_tokens(exchange, tokenizer)
    assert tokenizer.decode(tokens.ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    response = [token for token, is_said in zip(tokens.ids, tokens.is_response, strict=True) if is_said]
    assert tokenizer.decode(response) == exchange.answer + "<|im_end|>"


def test_rows_depend_on_their_seed_alone(tokenizer):
    first, again, other = (tiny_pair.chat_rows(tokenizer, seed, (2, 64)) for seed in ("a", "a", "b"))
    assert torch.equal(first.ids_RL, again.ids_RL)
    assert not torch.equal(first.ids_RL, other.ids_RL)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_a_pair_is_made_from_nothing_and_resumed(tmp_path, kind):
    short = TrainRecipe(steps=2, learning_rate=1e-3, warmup_steps=1)
    make_pair(tmp_path, kind, target_recipe=short, draft_recipe=short)
    draft, target = load_pair(tmp_path)
    made = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    make_pair(tmp_path, kind, target_recipe=short, draft_recipe=short)
    again, _ = load_pair(tmp_path)
    assert all(torch.equal(tensor, made[name]) for name, tensor in again.state_dict().items())
    make_draft(tmp_path, kind, recipe=short, second=True)
    fresh = (tmp_path / "target" / "config.json").read_text()
    shipped = (PAIRS[kind] / "target" / "config.json").read_text()
    assert json.loads(fresh) == json.loads(shipped)
    for folder in ("draft", "draft2"):
        assert (tmp_path / folder / "config.json").read_text() == (PAIRS[kind] / folder / "config.json").read_text()
    assert target.config.eos_token_id == 2


def test_the_shipped_tokenizer_equals_a_new_one(pair, tokenizer):
    shipped = AutoTokenizer.from_pretrained(pair / "target")
    assert shipped.get_vocab() == tokenizer.get_vocab()
    assert shipped.convert_tokens_to_ids(tiny_pair.SPECIAL_TOKENS) == [0, 1, 2, 3]
    assert (shipped.eos_token, shipped.mask_token_id) == ("<|im_end|>", tiny_pair.MASK)
    assert shipped.chat_template == tiny_pair.CHAT_TEMPLATE
    text = "Ünïcode 漢字 123\n\n  x"
    assert shipped.decode(shipped.encode(text)) == text


def test_the_shipped_files_are_small_and_complete(pair):
    sizes = {path: path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()}
    real = [path for path in sizes if "smollm2" in path.parts]
    assert sum(sizes[path] for path in real) <= 25e6
    assert sum(sizes.values()) - sum(sizes[path] for path in real) <= 12e6
    assert not list(ASSETS.rglob("*.pt"))
    config = json.loads((pair / "target" / "config.json").read_text())
    if "linear_attention" in config["layer_types"]:
        assert config["full_attention_interval"] == 4  # SGLang needs this field, which Transformers omits
    assert json.loads((pair / "target" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_shipped_draft_commits_more_than_four_tokens_per_step(pair, tokenizer):
    *_, overall = measure(*load_pair(pair), tokenizer, n_per_task=1)
    assert overall.mean_committed >= 4
    assert overall.n_steps > 100


@pytest.mark.full
def test_the_shipped_dflash_2_draft_commits_a_tenth_more(pair, tokenizer):
    """The DFlash and the DFlash 2 draft were trained on the same text for the same number of steps."""
    *_, plain = measure(*load_pair(pair), tokenizer, n_per_task=1)
    *_, second = measure(*load_pair(pair, second=True), tokenizer, n_per_task=1)
    assert second.mean_committed >= 1.1 * plain.mean_committed


def test_the_shipped_pair_generates_its_targets_output(pair, tokenizer):
    draft, target = load_pair(pair)
    for _, input_ids in tiny_pair.held_out_prompts(tokenizer, 1)[::3]:
        want = target.generate(input_ids, max_new_tokens=60, do_sample=False)
        assert torch.equal(draft.spec_generate(input_ids, target, 60, stop_token_ids=[2]), want)
