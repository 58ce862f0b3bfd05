"""Rollouts of a server as training data: features at the right tokens, refusals, and training without the target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.train import runs
from sglang_dflash.train.__main__ import main
from sglang_dflash.train.features import read_rows
from sglang_dflash.train.loop import LOG
from sglang_dflash.train.rollouts import features_of, read_rollouts
from sglang_dflash.train.text import Batches
from sglang_dflash.train.tiny_pair import make_tokenizer
from sglang_dflash.train.tokens import Tokens, stacked

LAYERS = (0, 2)
N_NEW = 9


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Return a folder with a tiny Qwen3 of random weights and its tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.3, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def answer_of(target: PreTrainedModel, prompt: list[int]) -> dict[str, Any]:
    """Return a greedy answer in the form of a server's: one list of rows for the prompt, then a row per token."""
    ids = target.generate(torch.tensor([prompt]), max_new_tokens=N_NEW, do_sample=False, eos_token_id=None)[0].tolist()
    _, features_1LC = read_rows(target, stacked([Tokens(ids, [True] * len(ids))]), LAYERS)
    rows, n = features_1LC[0].tolist(), len(prompt)
    return {"prompt_token_ids": prompt, "output_ids": ids[n:], "meta_info": {"hidden_states": [rows[:n], *rows[n:-1]]}}


@pytest.fixture(scope="module")
def file(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    prompts = [list(range(5 + 3 * i, 9 + 4 * i)) for i in range(6)]
    path.write_text("\n".join(json.dumps(answer_of(target, prompt)) for prompt in prompts))
    return path


def test_features_and_choices_equal_the_targets(file: Path, target: PreTrainedModel) -> None:
    rollouts = read_rollouts(file, 1000, torch.float32)
    batches = Batches(rollouts.documents, n_rows=2, pad_id=0, seed=0)
    for rows in [batches.at(0), batches.at(1), *batches.held_out]:
        choices_RL, features_RLC = rollouts.read(rows)
        want_RL, want_RLC = read_rows(target, rows, LAYERS)
        for r, document in enumerate(rows.document_R.tolist()):
            ids, is_response = rollouts.documents[document]
            n, n_prompt = len(ids), is_response.index(True)
            torch.testing.assert_close(features_RLC[r, : n - 1], want_RLC[r, : n - 1], atol=1e-4, rtol=1e-4)
            assert not features_RLC[r, n - 1 :].any(), "no row was computed for the last token"
            assert torch.equal(choices_RL[r, n_prompt - 1 : n - 1], want_RL[r, n_prompt - 1 : n - 1])


def test_long_rollouts_are_cut_with_their_features(file: Path) -> None:
    whole, pieces = (read_rollouts(file, length, torch.float32) for length in (1000, 7))
    assert max(len(document.ids) for document in pieces.documents) == 7
    first = [n for n, document in enumerate(pieces.documents) if document.ids == whole.documents[0].ids[7:14]]
    assert torch.equal(pieces.features[first[0]], whole.features[0][7:14])


def test_rows_of_a_second_prefill_take_the_place_of_the_first_ones() -> None:
    """A request of 3 prompt tokens is retracted after 2 tokens, and its next prefill reads all 5."""
    first, second = [[0.0], [1.0], [2.0]], [[10.0], [11.0], [12.0], [13.0], [14.0]]
    found = features_of(3, [first, [3.0], second, [5.0]])
    assert found.flatten().tolist() == [10, 11, 12, 13, 14, 5]
    cached = [[13.0], [14.0]]  # after a cached prefix of 3 tokens
    assert features_of(3, [first, [3.0], cached, [5.0]]).flatten().tolist() == [0, 1, 2, 13, 14, 5]


@pytest.mark.parametrize(
    ("hidden_states", "found"),
    [
        ([[[1.0], [2.0]], [3.0]], "found 3 rows of hidden states from position 1 on, and the first 4 positions"),
        ([], "found 0 rows of hidden states from position 0 on"),
        ([[[0.0]] * 4, [3.0]], "from position -1 on"),
    ],
)
def test_missing_rows_are_refused(hidden_states: list[Any], found: str) -> None:
    with pytest.raises(ValueError, match=f"{found}.*; start the server with --disable-radix-cache --chunked"):
        features_of(3, hidden_states)


def test_a_bad_line_is_named(file: Path, tmp_path: Path) -> None:
    good = json.loads(file.read_text().splitlines()[0])
    states = good["meta_info"]["hidden_states"]
    bad = {
        "found .*; send return_prompt_token_ids to /generate, and give its": {"text": "hello"},
        "found the hidden states of one token; send": good | {"meta_info": {"hidden_states": states[-1]}},
        "8 output_ids do not fit the hidden states": good | {"output_ids": good["output_ids"][1:]},
        "found 0 rows": good | {"meta_info": {}},
    }
    path = tmp_path / "bad.jsonl"
    for sentence, row in bad.items():
        path.write_text(json.dumps(good) + "\n" + json.dumps(row))
        with pytest.raises(ValueError, match=f"line 2: {sentence}"):
            read_rollouts(path, 1000, torch.float32)
    narrow = good | {"meta_info": {"hidden_states": [[[0.0]] * len(states[0]), *[[0.0]] * (len(states) - 1)]}}
    path.write_text(json.dumps(good) + "\n" + json.dumps(narrow))
    with pytest.raises(ValueError, match=r"has rows of \[1, 64\] features; keep the lines of one server"):
        read_rollouts(path, 1000, torch.float32)
    path.write_text(json.dumps(good))
    with pytest.raises(ValueError, match="has one usable document"):
        read_rollouts(path, 1000, torch.float32)


def command(folder: Path, out: Path, *more: str) -> list[str]:
    sizes = "--layers 1 --block-size 4 --rows 2 --anchors 4 --steps 4 --warmup-steps 1 --eval-prompts 0"
    where = ("--target", str(folder), "--out", str(out))
    return ["draft", *where, *sizes.split(), "--dtype", "fp32", "--device", "cpu", *more]


def test_a_draft_trained_on_rollouts_equals_one_whose_features_the_target_computes(
    file: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = ("--target-layer-ids", "0,2")
    with monkeypatch.context() as patch:
        patch.setattr("sglang_dflash.train.draft.read_rows", lambda *_, **__: pytest.fail("the target reads"))
        assert main(command(folder, tmp_path / "served", "--rollouts", str(file), *layers)) == 0
    documents = read_rollouts(file, 1000, torch.float32).documents
    monkeypatch.setattr(runs, "read_documents", lambda *_: documents)
    assert main(command(folder, tmp_path / "computed", "--data", "any.jsonl", *layers)) == 0
    served, computed = (DraftModel.from_pretrained(tmp_path / name).state_dict() for name in ("served", "computed"))
    for name in computed:
        torch.testing.assert_close(served[name], computed[name], atol=1e-4, rtol=1e-3)
    (line,) = [json.loads(line) for line in (tmp_path / "served" / LOG).read_text().splitlines()]
    assert line["target_agrees"] == 1.0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ((), "--rollouts needs --target-layer-ids; give those of the draft that was served"),
        (("--target-layer-ids", "0,1,2"), "the rollouts have 64 features per token, and --target-layer-ids have 96; g"),
        (("--target-layer-ids", "0,2", "--cache", "c"), "--rollouts has the features, so --cache has no use; drop one"),
    ],
)
def test_options_that_do_not_fit_rollouts_are_refused(
    file: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], sentence: str
) -> None:
    assert main(command(folder, tmp_path / "out", "--rollouts", str(file), *more)) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_does_not_resume_with_other_features(
    file: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = ("--target-layer-ids", "0,2")
    assert main(command(folder, tmp_path / "out", "--rollouts", str(file), *layers)) == 0
    other = tmp_path / "other.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["meta_info"]["hidden_states"][-1][0] += 1.0
    other.write_text("\n".join(map(json.dumps, rows)))
    assert main(command(folder, tmp_path / "out", "--rollouts", str(other), *layers)) == 2
    assert "(features " in capsys.readouterr().err
