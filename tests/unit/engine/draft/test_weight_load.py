"""Tensors that reach a served draft: each load must change only what it names, and nothing if it does not fit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft.mask_row import MASK_ROW, write_row
from sglang_dflash.engine.draft.sglang_model import DFlashDraftModel
from sglang_dflash.pairs.tiny.pairs import HYBRID

DRAFT = checkpoint.read(str(HYBRID.draft))
H = DRAFT.hidden_size


class Served(DFlashDraftModel):
    """A served draft with a norm, a reduced vocabulary and a mask row, and without the layers of a real one."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.fields = replace(DRAFT, draft_vocab_size=3)
        self.config = SimpleNamespace(packing=None, mask_file="")
        self.norm: Any = nn.RMSNorm(H)
        self.d2t = nn.Parameter(torch.tensor([0, 1, 3]), requires_grad=False)
        self.mask_embedding = nn.Parameter(torch.zeros(H), requires_grad=False)
        self.context: Any = SimpleNamespace(qkv_LXH=torch.zeros(1))  # its layers are not quantized
        self.needed = {"norm.weight", "d2t", MASK_ROW}
        self.loaded = set(self.needed)


def test_the_mask_row_of_a_file_is_read_with_its_checkpoint_only(tmp_path: Path) -> None:
    """Tensors that are pushed later, among them another row, must not be replaced by the file's row."""
    write_row(DRAFT, torch.full((H,), 5.0), tmp_path)
    model = Served()
    model.config.mask_file = str(tmp_path / "mask_embedding.pt")
    model.load_weights([("norm.weight", torch.full((H,), 2.0))])
    assert model.mask_embedding.tolist() == [5.0] * H
    model.load_weights([(MASK_ROW, torch.full((H,), 7.0))])
    assert model.mask_embedding.tolist() == [7.0] * H
    assert model.norm.weight.tolist() == [2.0] * H


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("d2t", torch.tensor([0, 2, 3]), "d2t lists other tokens than that of the served draft; restart the server"),
        ("norm.bias", torch.zeros(H), "a DFlash draft has no tensor 'norm.bias'"),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(name: str, tensor: torch.Tensor, sentence: str) -> None:
    """The tensor that does not fit follows one that does."""
    model = Served()
    with pytest.raises(ValueError, match=sentence):
        model.load_weights([("norm.weight", torch.full((H,), 2.0)), (name, tensor)])
    assert model.norm.weight.tolist() == [1.0] * H
    assert model.d2t.tolist() == [0, 1, 3]


def test_names_with_an_exporters_prefix_are_checked_too() -> None:
    model = Served()
    model.fields = replace(model.fields, has_embed_tokens=True, mask_token_id=2)
    model.load_weights([("model.embed_tokens.weight", torch.arange(4.0)[:, None].expand(4, H))])
    assert model.mask_embedding.tolist() == [2.0] * H, "the row of the mask token"
    with pytest.raises(ValueError, match="d2t lists other tokens"):
        model.load_weights([("model.d2t", torch.tensor([0, 2, 3]))])


def test_an_update_may_repeat_the_served_vocabulary() -> None:
    model = Served()
    model.load_weights([("d2t", torch.tensor([0, 1, 3])), ("norm.weight", torch.full((H,), 2.0))])
    assert model.norm.weight.tolist() == [2.0] * H
