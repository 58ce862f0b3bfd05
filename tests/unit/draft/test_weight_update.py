"""A checkpoint named in `/update_weights_from_disk` reaches the model it belongs to, and only that one."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.draft import checkpoint
from sglang_dflash.draft.sglang_model import DFlashDraftModel
from sglang_dflash.draft.weight_update import BUILT, own_checkpoint_only
from sglang_dflash.tiny.pairs import HYBRID

SERVED, VOCAB_SIZE = checkpoint.read(str(HYBRID.draft)), 1024
DRAFT = SimpleNamespace(get_model=lambda: object.__new__(DFlashDraftModel))
TARGET = SimpleNamespace(get_model=object)


@pytest.fixture
def load() -> Callable[[Any, object], tuple[bool, str]]:
    update = own_checkpoint_only(SERVED, VOCAB_SIZE)

    def stock(updater: Any, model_path: str, load_format: str) -> tuple[bool, str]:
        return True, f"loaded {model_path} as {load_format}"

    return lambda updater, path: update(stock, updater, str(path), "auto")


def test_each_checkpoint_goes_to_its_own_model(load: Callable) -> None:
    assert load(TARGET, HYBRID.target) == (True, f"loaded {HYBRID.target} as auto")
    assert load(DRAFT, HYBRID.draft) == (True, f"loaded {HYBRID.draft} as auto")
    assert load(DRAFT, HYBRID.target) == (
        True,
        f"Succeeded to update the target; the draft stays: {HYBRID.target} is not a DFlash draft.",
    )
    assert load(TARGET, HYBRID.draft) == (True, f"The target stays: {HYBRID.draft} is a DFlash draft.")


@pytest.mark.parametrize("model", [TARGET, DRAFT], ids=["target", "draft"])
def test_no_graph_is_captured_again(model: SimpleNamespace) -> None:
    """SGLang would build those of one width, for the attention backend that was used last."""
    loaded = list[str]()

    def stock(updater: Any, model_path: str, load_format: str) -> tuple[bool, str]:
        loaded.append(model_path)
        return True, ""

    update = own_checkpoint_only(SERVED, VOCAB_SIZE)
    assert update(stock, model, str(HYBRID.target), "auto", recapture_cuda_graph=True) == (
        False,
        "recapture_cuda_graph is not supported with DFLASH; leave it out: weights are loaded in place",
    )
    assert loaded == []


def test_weights_without_a_config_are_the_target_s(load: Callable, tmp_path: Path) -> None:
    assert load(TARGET, tmp_path)[1].startswith("loaded")
    assert load(DRAFT, tmp_path)[1].endswith("is not a DFlash draft.")


def test_another_kind_of_draft_is_refused_by_the_field(load: Callable, tmp_path: Path) -> None:
    config = json.loads((HYBRID.draft / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(HYBRID.draft / "model.safetensors")
    said = f"{tmp_path}: mask_token_id is 4, and the draft being served has 3; restart with it"
    assert load(DRAFT, tmp_path) == (False, said)


def test_a_damaged_draft_is_refused(load: Callable, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((HYBRID.draft / "config.json").read_bytes())
    said = f"{tmp_path} has a config.json and no *.safetensors; fetch the draft's weights"
    assert load(DRAFT, tmp_path) == (False, said)


def test_all_that_is_built_from_is_compared() -> None:
    """The rest: where it lies, its dtype, and what only its training or the launch decided."""
    left_out = {
        "path", "dtype", "block_size", "num_target_layers", "vocab_size", "max_position_embeddings", "borrowed",
    }  # fmt: skip
    assert set(vars(SERVED)) - set(BUILT) == left_out
