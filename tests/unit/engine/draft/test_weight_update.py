"""Weight updates from disk: each checkpoint must reach its own model, and each tensor its parameter."""

import json
from collections.abc import Callable
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, UpdateWeightsFromTensorReqInput
from torch import nn

from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft.mask_row import write_row
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.engine.draft.sglang_model import DFlashDraftModel
from sglang_dflash.engine.draft.weight_push import (
    draft_stays,
    quantized_draft_stays,
    refuse_unknown,
    to_target_unless_named,
)
from sglang_dflash.engine.draft.weight_update import BUILT, own_checkpoint_only, require_like
from sglang_dflash.engine.draft.weights import QUANTIZED, checkpoint_names, fused_name, lay_side_by_side
from sglang_dflash.pairs.tiny.pairs import HYBRID
from tests.fixtures.packing import quantized_draft

SERVED, VOCAB_SIZE, BLOCK_SIZE = checkpoint.read(str(HYBRID.draft)), 1024, 12  # trained for blocks of 16
MODEL = object.__new__(DFlashDraftModel)
MODEL.config = SimpleNamespace(packing=None)
DRAFT, TARGET = SimpleNamespace(get_model=lambda: MODEL), SimpleNamespace(get_model=object)


@pytest.fixture
def load() -> Callable[[Any, object], tuple[bool, str]]:
    update = own_checkpoint_only(SERVED, vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE)

    def stock(updater: Any, model_path: str, *, load_format: str) -> tuple[bool, str]:
        return True, f"loaded {model_path} as {load_format}"

    return lambda updater, path: update(stock, updater, str(path), load_format="auto")


def test_each_checkpoint_goes_to_its_own_model(load: Callable) -> None:
    assert load(TARGET, HYBRID.target) == (True, f"loaded {HYBRID.target} as auto")
    assert load(DRAFT, HYBRID.draft) == (True, f"loaded {HYBRID.draft} as auto")
    assert load(DRAFT, HYBRID.target) == (
        True,
        f"Succeeded to update the target; the draft stays: {HYBRID.target} is not a DFlash draft.",
    )
    assert load(TARGET, HYBRID.draft) == (True, f"The target stays: {HYBRID.draft} is a DFlash draft.")


def test_the_model_gets_the_format_of_the_new_files(load: Callable, tmp_path: Path) -> None:
    """The served draft, the new one, and the next may be stored in different formats."""
    for form in ("int4", "modelopt-nvfp4-file"):
        folder = quantized_draft(HYBRID.draft, tmp_path / form, form)
        assert load(DRAFT, folder) == (True, f"loaded {folder} as auto")
        assert MODEL.config.packing == checkpoint.read(str(folder)).packing is not None
    load(DRAFT, HYBRID.draft)
    assert MODEL.config.packing is None


def test_the_model_gets_the_mask_row_of_the_new_files(tmp_path: Path) -> None:
    """The served draft and the new one each have the row in a file of their own."""
    folders = [tmp_path / "served", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).symlink_to(HYBRID.draft / name)
        write_row(SERVED, torch.ones(SERVED.hidden_size), folder)
    served = checkpoint.read(str(folders[0]))
    update = own_checkpoint_only(served, vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE)
    MODEL.config.mask_file = ""
    assert update(lambda *_: (True, "loaded"), DRAFT, str(folders[1])) == (True, "loaded")
    assert MODEL.config.mask_file == str(folders[1] / "mask_embedding.pt")


@pytest.mark.parametrize("model", [TARGET, DRAFT], ids=["target", "draft"])
def test_no_graph_is_captured_again(model: SimpleNamespace) -> None:
    """With `recapture_cuda_graph` SGLang would recapture the graphs of one width only, so the flag is refused."""
    loaded = list[str]()

    def stock(updater: Any, model_path: str, load_format: str) -> tuple[bool, str]:
        loaded.append(model_path)
        return True, ""

    update = own_checkpoint_only(SERVED, vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE)
    assert update(stock, model, str(HYBRID.target), "auto", recapture_cuda_graph=True) == (
        False,
        "recapture_cuda_graph is not supported with DFLASH; leave it out: weights are loaded in place",
    )
    assert loaded == []


def test_a_quantized_draft_takes_no_weights() -> None:
    update = own_checkpoint_only(SERVED, vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE, served_is_quantized=True)
    stock = pytest.fail
    assert update(stock, DRAFT, str(HYBRID.draft), "auto") == (False, QUANTIZED)
    assert update(lambda *_: (True, "loaded"), TARGET, str(HYBRID.target), "auto") == (True, "loaded")


def test_a_push_session_leaves_a_quantized_draft_out() -> None:
    def stock(manager: None, request: BeginWeightUpdateReqInput) -> str:
        return request.selector

    assert quantized_draft_stays(stock, None, BeginWeightUpdateReqInput()) == "target"
    refused = quantized_draft_stays(stock, None, BeginWeightUpdateReqInput(selector="draft"))
    assert (refused.success, refused.message) == (False, QUANTIZED)


@pytest.mark.parametrize(("selector", "reached"), [("all", "target"), ("target", "target"), ("draft", "draft")])
def test_a_push_reaches_the_draft_only_if_its_selector_names_it(selector: str, reached: str) -> None:
    def stock(manager: str, request: UpdateWeightsFromTensorReqInput) -> tuple[str, str]:
        return manager, request.selector

    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], selector=selector)
    assert to_target_unless_named(stock, "manager", request) == ("manager", reached)


def test_a_push_without_a_selector_leaves_the_draft_unchanged() -> None:
    def stock(updater: Any, request: str) -> tuple[bool, str]:
        return True, f"loaded {request}"

    assert draft_stays(stock, TARGET, "handles") == (True, "loaded handles")
    assert draft_stays(stock, DRAFT, "handles")[1].startswith("Succeeded to update the target; the draft stays")


def pushed(updater: SimpleNamespace, error: Exception) -> tuple[bool, str]:
    """Push tensors, by name as SGLang's manager does, and let SGLang's loader raise `error`."""

    def stock(updater: Any, named_tensors: list, load_format: str | None) -> tuple[bool, str]:
        raise error

    return refuse_unknown(stock, updater, named_tensors=[], load_format=None)


def test_a_push_to_a_quantized_draft_is_refused_by_its_cause() -> None:
    assert pushed(DRAFT, ValueError(QUANTIZED)) == (False, QUANTIZED)


@pytest.mark.parametrize(
    "error", [kind("x") for kind in (ValueError, KeyError, IndexError, RuntimeError, AssertionError)]
)
@pytest.mark.parametrize(("updater", "model", "other"), [(DRAFT, "draft", "target"), (TARGET, "target", "draft")])
def test_a_push_that_does_not_fit_is_answered(
    updater: SimpleNamespace, model: str, other: str, error: Exception
) -> None:
    """An error that is not caught here would end the scheduler."""
    is_done, message = pushed(updater, error)
    assert not is_done
    assert message.startswith(f"the {model} cannot take these tensors ({type(error).__name__}: {error}); ")
    assert f'push the {other}\'s with "selector": "{other}"' in message


def test_other_failures_of_a_push_keep_their_words() -> None:
    assert pushed(DRAFT, torch.OutOfMemoryError("no memory")) == (False, "no memory")
    with pytest.raises(ZeroDivisionError):
        pushed(DRAFT, ZeroDivisionError())


def test_weights_without_a_config_belong_to_the_target(load: Callable, tmp_path: Path) -> None:
    assert load(TARGET, tmp_path)[1].startswith("loaded")
    assert load(DRAFT, tmp_path)[1].endswith("is not a DFlash draft.")


DIFFERENT = {
    "mask_token_id": (4, "mask_token_id is 4, and the draft being served has 3"),
    "num_target_layers": (36, "num_target_layers is 36, and the draft being served has 4"),
    "block_size": (8, "block_size is 8, and this server drafts blocks of 12"),
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_a_different_draft_is_refused_by_its_field(field: str, load: Callable, tmp_path: Path) -> None:
    config = json.loads((HYBRID.draft / "config.json").read_text())
    value, message = DIFFERENT[field]
    config["dflash_config"][field] = value  # nested fields take precedence
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(HYBRID.draft / "model.safetensors")
    assert load(DRAFT, tmp_path) == (False, f"{tmp_path}: {message}; restart the server with the new draft")


def like(**fields: Any) -> Checkpoint:
    """Return the served draft's record with other fields, without the checks of a checkpoint that is read."""
    record = copy(SERVED)
    vars(record).update(fields)
    return record


@pytest.mark.parametrize("field", BUILT)
def test_each_field_that_a_model_is_built_from_is_compared(field: str) -> None:
    with pytest.raises(ValueError, match=f": {field} is other, and the draft being served has "):
        require_like(SERVED, like(**{field: "other"}), VOCAB_SIZE, BLOCK_SIZE)


def test_a_selector_needs_the_vocabulary_of_the_served_one() -> None:
    """Only a selector and Domino have a row per token id. Another draft's vocabulary may be padded otherwise."""
    padded = {"vocab_size": VOCAB_SIZE + 8}
    require_like(SERVED, like(**padded), VOCAB_SIZE, BLOCK_SIZE)
    for kind in ({"selector_rank": 8}, {"gru_hidden_dim": 8}):
        with pytest.raises(ValueError, match="vocab_size is 1032, and the draft being served has 1024"):
            require_like(like(vocab_size=VOCAB_SIZE, **kind), like(**kind, **padded), VOCAB_SIZE, BLOCK_SIZE)


def test_a_lilicorr_draft_needs_the_block_of_the_served_one() -> None:
    """Shapes of its tensors depend on the block."""
    longer = {"block_size": SERVED.block_size + 8}
    require_like(SERVED, like(**longer), VOCAB_SIZE, BLOCK_SIZE)
    with pytest.raises(ValueError, match="block_size is 24, and the draft being served has 16"):
        require_like(like(lilicorr="sizes"), like(lilicorr="sizes", **longer), VOCAB_SIZE, BLOCK_SIZE)


def test_a_server_whose_blocks_are_longer_than_trained_takes_an_equal_draft() -> None:
    require_like(SERVED, SERVED, VOCAB_SIZE, block_size=24)
    with pytest.raises(ValueError, match="block_size is 15, and this server drafts blocks of 24"):
        require_like(SERVED, like(block_size=15), VOCAB_SIZE, block_size=24)


def test_a_load_that_fails_is_answered() -> None:
    """SGLang loads the same files again after an error, and the second error would end the scheduler."""
    update = own_checkpoint_only(SERVED, vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE)

    def stock(*_: object) -> tuple[bool, str]:
        raise AssertionError("a shape differs")

    ok, message = update(stock, DRAFT, str(HYBRID.draft))
    assert not ok
    assert message.startswith(f"the draft in {HYBRID.draft} was not loaded (AssertionError: a shape differs); some")
    with pytest.raises(AssertionError, match="a shape differs"):
        update(stock, TARGET, str(HYBRID.target))


def test_a_path_that_cannot_be_read_is_left_to_sglang(load: Callable) -> None:
    """SGLang answers with its own error. An OSError in the hook would end the scheduler."""
    path = f"/{'x' * 300}"
    with pytest.raises(OSError, match="File name too long"):
        Path(path).exists()
    assert load(TARGET, path) == (True, f"loaded {path} as auto")


def test_a_draft_for_shorter_blocks_that_suffice_is_loaded(load: Callable, tmp_path: Path) -> None:
    config = json.loads((HYBRID.draft / "config.json").read_text()) | {"block_size": 12, "num_target_layers": None}
    config["dflash_config"].pop("block_size", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(HYBRID.draft / "model.safetensors")
    assert load(DRAFT, tmp_path) == (True, f"loaded {tmp_path} as auto")


def test_a_damaged_draft_is_refused(load: Callable, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((HYBRID.draft / "config.json").read_bytes())
    message = f"{tmp_path} has a config.json and no *.safetensors; fetch the draft's weights"
    assert load(DRAFT, tmp_path) == (False, message)


def test_all_fields_that_models_are_built_from_are_compared() -> None:
    """`require_like` compares the fields `BUILT`, from which a draft's model is built.

    For three of the other ten fields it has separate rules: `block_size`, `num_target_layers` and `vocab_size`.
    """
    left_out = {
        "path", "dtype", "block_size", "num_target_layers", "vocab_size", "max_position_embeddings", "borrowed",
        "architecture", "packing", "mask_file",
    }  # fmt: skip
    assert set(vars(SERVED)) - set(BUILT) == left_out


def test_fused_names_locate_the_parts_of_a_projection() -> None:
    assert fused_name("layers.0.self_attn.k_proj.weight") == ("layers.0.self_attn.qkv_proj.weight", ("k",))
    assert fused_name("layers.1.mlp.up_proj.weight") == ("layers.1.mlp.gate_up_proj.weight", (1,))
    assert fused_name("fc.weight") == ("fc.weight", ())


def test_checkpoint_names_follow_from_parameters() -> None:
    parameters = ["layers.0.self_attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.weight", "norm.weight"]
    names = checkpoint_names(parameters)
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    assert names == {"norm.weight", *(f"layers.0.{part}_proj.weight" for part in parts)}
    assert {fused_name(name)[0] for name in names} == set(parameters)


def test_updating_a_parameter_updates_the_stack() -> None:
    layers = [nn.Linear(3, 2, bias=False) for _ in range(4)]
    before = [layer.weight.detach().clone() for layer in layers]
    stack = lay_side_by_side([layer.weight for layer in layers])
    assert torch.equal(stack, torch.stack(before))
    with torch.no_grad():
        layers[2].weight.copy_(torch.full((2, 3), 7.0))  # as a weight loader does
    assert torch.equal(stack[2], torch.full((2, 3), 7.0))
    assert torch.equal(stack[1], before[1])
