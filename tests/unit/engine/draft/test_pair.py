"""Checks of a draft against its target: vocabularies, codebooks, and target tensors stored in the draft's files."""

import json
import logging
from copy import copy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.engine.draft import checkpoint, tensors
from sglang_dflash.engine.draft.pair import check_pair
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.engine.draft.sglang_model import DFlashDraftModel
from sglang_dflash.engine.draft.weight_update import own_checkpoint_only
from sglang_dflash.engine.draft.weights import require_all_known
from sglang_dflash.errors import NotSupported
from tests.fixtures.checkpoints import SECOND

OF_THE_TARGET = {
    "model.embed_tokens.weight": [128, 64],
    "lm_head.weight": [128, 64],
    "verifier_norm.weight": [64],
    "t2d": [128],
    "d2t": [128],
}
NAMES = ["d2t", "embed_tokens.weight", "lm_head.weight", "t2d", "verifier_norm.weight"]


def check(draft: Checkpoint, vocab_size: int = 128) -> None:
    check_pair(draft, "target", hidden_size=64, vocab_size=vocab_size, n_layers=4)


@pytest.mark.parametrize(("own", "target"), [(100, 128), (128, 136), (None, 128)])
def test_a_vocabulary_may_be_padded(own, target, checkpoints, tmp_path):
    check(checkpoint.read(str(checkpoints.write_draft(tmp_path, vocab_size=own))), target)


def test_the_mask_token_must_be_in_the_targets_vocabulary(checkpoints, tmp_path):
    folder = checkpoints.write_draft(tmp_path, vocab_size=200, dflash_config={"mask_token_id": 128})
    with pytest.raises(ValueError, match="mask_token_id 128 is outside the target's vocabulary of 128"):
        check(checkpoint.read(str(folder)))


def test_codebooks_must_have_the_targets_rows(checkpoints, tmp_path):
    folder = checkpoints.write_draft(tmp_path, architectures=["DFlash2DraftModel"], dflash_config=SECOND)
    check(checkpoint.read(str(folder)))
    sentence = r"codebooks of its selector have 128 rows \(config.json: vocab_size\), .* target's vocabulary has 136 \("
    with pytest.raises(ValueError, match=sentence):
        check(checkpoint.read(str(folder)), 136)


def test_domino_needs_a_row_for_every_token(checkpoints, tmp_path):
    """Its rollout looks up a row for each candidate of the target's head."""
    draft = copy(checkpoint.read(str(checkpoints.write_draft(tmp_path))))
    vars(draft).update(gru_hidden_dim=8, emb_dim=8)
    for n_rows in (128, 136):
        vars(draft)["vocab_size"] = n_rows
        check(draft)
    with pytest.raises(ValueError, match=r"corrections of logits have 136 rows .* the target's vocabulary has 137 \("):
        check(draft, 137)


def test_codebooks_must_have_the_configs_rows(checkpoints, tmp_path):
    second = {"architectures": ["DFlash2DraftModel"], "dflash_config": SECOND}
    folder = checkpoints.write_draft(tmp_path, **second, vocab_size=100)
    sentence = r"codebook has shape \[128, 8\], and config.json has vocab_size 100 .* a row for every token of the voc"
    with pytest.raises(ValueError, match=sentence):
        checkpoint.read(str(folder))


@pytest.fixture
def borrowing(checkpoints: ModuleType, tmp_path: Path) -> Path:
    """Return a draft whose files also hold tensors of its target."""
    folder = checkpoints.write_draft(tmp_path / "borrowing")
    checkpoints.write_tensors(folder, checkpoints.draft_shapes() | OF_THE_TARGET)
    return folder


def test_tensors_of_the_target_stay_unused(borrowing):
    draft = checkpoint.read(str(borrowing))
    assert sorted(draft.borrowed) == NAMES
    check(draft)
    assert tensors.tensors_of(draft, borrowing, load_file).keys() == tensors.expected_shapes(draft).keys()
    assert draft.to_json() == checkpoint.parse(json.loads((borrowing / "config.json").read_text()), "").to_json()


@pytest.mark.parametrize(
    ("name", "shape", "error", "sentence"),
    [
        ("lm_head.weight", [96, 64], ValueError, r"lm_head.weight has shape \[96, 64\], not the target's \[128, 64\]"),
        ("embed_tokens.weight", [128, 32], ValueError, r"embed_tokens.weight has shape \[128, 32\]"),
        ("verifier_norm.weight", [128], ValueError, r"verifier_norm.weight has shape \[128\], not the target's \[64\]"),
        ("d2t", [32], ValueError, "d2t has 32 entries .* no draft_vocab_size; set draft_vocab_size to 32"),
        ("lm_head.bias", [128], NotSupported, "1 tensors are not part of a DFlash draft, the first is lm_head.bias"),
    ],
)
def test_target_tensors_of_another_size_are_refused(name, shape, error, sentence, checkpoints, tmp_path):
    folder = checkpoints.write_draft(tmp_path)
    checkpoints.write_tensors(folder, checkpoints.draft_shapes() | {name: shape})
    with pytest.raises(error, match=sentence):
        check(checkpoint.read(str(folder)))


@pytest.mark.parametrize(("vocab_size", "ok"), [(128, True), (136, False)])
def test_an_update_from_disk_checks_the_targets_tensors(vocab_size, ok, borrowing):
    update = own_checkpoint_only(checkpoint.read(str(borrowing)), vocab_size=vocab_size, block_size=8)
    model = object.__new__(DFlashDraftModel)
    model.config = SimpleNamespace(packing=None)
    draft = SimpleNamespace(get_model=lambda: model)

    def stock(updater: Any, model_path: str) -> tuple[bool, str]:
        return True, "loaded"

    done, message = update(stock, draft, str(borrowing))
    assert done is ok
    assert ok or "embed_tokens.weight has shape [128, 64], not the target's" in message


def test_a_push_skips_the_targets_tensors(caplog):
    with caplog.at_level(logging.INFO):
        require_all_known(["norm.weight", "model.embed_tokens.weight", "lm_head.weight"], {"norm.weight"})
    assert caplog.messages == [
        "unused tensors: lm_head.weight, model.embed_tokens.weight (DFlash lacks them, or uses the target's)"
    ]
    with pytest.raises(ValueError, match=r"a DFlash draft has no tensor 'lm_head.bias'"):
        require_all_known(["lm_head.bias"], {"norm.weight"})


def test_plain_torch_loads_a_draft_with_target_tensors(borrowing):
    from sglang_dflash.reference.torch import DraftModel

    tensors = load_file(borrowing / "model.safetensors")
    save_file(tensors | {"norm.weight": torch.ones(64)}, borrowing / "model.safetensors")
    assert bool((DraftModel.from_pretrained(borrowing).state_dict()["norm.weight"] == 1).all())
