"""A draft's config.json means the same to the server, to plain torch, and to whoever reads what the trainer writes."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_dflash.draft import checkpoint
from sglang_dflash.draft.checkpoint import FULL, SLIDING, Checkpoint
from sglang_dflash.errors import NotSupported
from sglang_dflash.model import DraftConfig, DraftModel

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
WINDOW = {"sliding_window": 32, "use_sliding_window": True}

# What config.json says -> what is read. The draft is that of `fixtures/checkpoints.py`; None leaves a field out.
ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {"layer_types": (FULL, FULL), "sliding_window": None, "rope_parameters": ROPE, "block_size": 8}),
    # Increasing functions of a logit: they move no argmax.
    "output_multiplier": ({"dflash_config": {"output_multiplier": 0.5}}, {}),
    "final_logit_softcapping": ({"dflash_config": {"final_logit_softcapping": 30.0}}, {}),
    "mask_token_id at the top": ({"mask_token_id": 5, "dflash_config": {"mask_token_id": None}}, {"mask_token_id": 5}),
    "block_size in either place": ({"block_size": 16, "dflash_config": {"block_size": 4}}, {"block_size": 4}),
    "num_target_layers inside": (
        {"num_target_layers": None, "dflash_config": {"num_target_layers": 4}}, {"num_target_layers": 4},
    ),
    "no num_target_layers": ({"num_target_layers": None}, {"num_target_layers": None}),
    "no vocab_size": ({"vocab_size": None}, {"vocab_size": None}),
    "no layer_types": ({"layer_types": None}, {"layer_types": (FULL, FULL)}),
    "no model_type": ({"model_type": None}, {}),
    "another epsilon": ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-5}),
    "half": ({"dtype": None, "torch_dtype": "float16"}, {"dtype": "float16"}),
    "no dtype": ({"dtype": None}, {"dtype": "bfloat16"}),
    "the target's rotary fields, with rope_dim": (
        {"partial_rotary_factor": 0.25, "rope_parameters": ROPE | {"rope_dim": 16, "mrope_section": [3, 3, 2]}},
        {"rope_parameters": ROPE},
    ),
    "rotary fields of transformers 4": (
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    ),
    "a window": (
        WINDOW | {"layer_types": [SLIDING, FULL]}, {"layer_types": (SLIDING, FULL), "layer_windows": (32, None)},
    ),
    "a window that no layer has": (WINDOW, {"sliding_window": None, "layer_windows": (None, None)}),
    "is_causal as v1 has it, sliding": (
        WINDOW | {"layer_types": [SLIDING, SLIDING], "is_causal": True}, {"layer_windows": (32, 32)},
    ),
    "causal as v1 has it, full": ({"dflash_config": {"causal": False}}, {"layer_windows": (None, None)}),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], type[ValueError], str]] = {
    "mrope_section without rope_dim": (
        {"rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}}, NotSupported, "mrope_section without rope_dim=16",
    ),
    "partial_rotary_factor": ({"partial_rotary_factor": 0.25}, NotSupported, "partial_rotary_factor or mrope_section"),
    "rope_dim": ({"rope_parameters": ROPE | {"rope_dim": 8}}, NotSupported, "rope_dim=8 turns a part of heads of 16"),
    "no num_key_value_heads": ({"num_key_value_heads": None}, ValueError, "config.json has no num_key_value_heads"),
    "no head_dim": ({"head_dim": None}, ValueError, "config.json has no head_dim"),
    "no mask_token_id": ({"dflash_config": {"mask_token_id": None}}, ValueError, "config.json has no mask_token_id"),
    "target_layer_ids decreasing": ({"dflash_config": {"target_layer_ids": [2, 0]}}, ValueError, "do not increase"),
    "block_size 1": ({"block_size": 1}, ValueError, "block_size is 1, not an integer of at least 2"),
    "use_sliding_window alone": (WINDOW | {"layer_types": None}, ValueError, "is set without layer_types"),
    "a window below the block": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 4}, ValueError, "sliding_window 4 is smaller than block_siz",
    ),
    "gating": ({"gating": "x"}, NotSupported, "gating='x' is not DFlash v1"),
    "gru_hidden": ({"dflash_config": {"gru_hidden": 8}}, NotSupported, "gru_hidden=8 belongs to Domino"),
    "markov_order": ({"dflash_config": {"markov_order": 2}}, NotSupported, "markov_order=2 belongs to DSpark"),
    "num_experts": ({"num_experts": 8}, NotSupported, "num_experts=8 is not DFlash v1"),
    "another architecture": ({"architectures": ["DFlash2DraftModel"]}, NotSupported, "architecture is DFlash2Draft"),
    "another family": ({"model_type": "llama"}, NotSupported, "model_type='llama' is not DFlash v1"),
    "no dflash_config": ({"dflash_config": None}, ValueError, "config.json has no dflash_config object"),
    "causal full layers": (
        {"dflash_config": {"causal": True}}, NotSupported, "dflash_config.causal=True on full_attention layers is not",
    ),
    "is_causal full layers": ({"is_causal": True}, NotSupported, "is_causal=True on full_attention layers is not DFla"),
    "sliding layers that are not causal": (
        WINDOW | {"layer_types": [SLIDING, SLIDING], "is_causal": False},
        NotSupported, "is_causal=False on sliding_attention layers is not DFlash v1",
    ),
    "one word for layers of two kinds": (
        WINDOW | {"layer_types": [SLIDING, FULL], "is_causal": True}, NotSupported, "is_causal=True on full_attention",
    ),
    "two words that differ": (
        {"is_causal": False, "dflash_config": {"causal": True}}, NotSupported, "dflash_config.causal=True on full_att",
    ),
}  # fmt: skip


@pytest.fixture
def write(checkpoints: ModuleType, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    return lambda changes: checkpoints.write_draft(tmp_path / "given", **changes)


@pytest.mark.parametrize("case", ACCEPTED)
def test_all_read_the_same(case: str, write: Callable, tmp_path: Path) -> None:
    changes, meaning = ACCEPTED[case]
    folder, trained = write(changes), tmp_path / "trained"
    server = checkpoint.read(str(folder))
    assert {name: vars(server).get(name, server.layer_windows) for name in meaning} == meaning
    plain = DraftModel.from_pretrained(folder)
    assert plain.config == server
    plain.save_pretrained(trained)
    # The file says what the tensors are; those of the fixture are bf16, whatever its config says.
    written = replace(server, dtype="bfloat16")
    assert checkpoint.read(str(trained)) == DraftModel.from_pretrained(trained).config == written


@pytest.mark.parametrize("case", REFUSED)
def test_all_refuse_the_same(case: str, write: Callable) -> None:
    changes, error, sentence = REFUSED[case]
    folder, said = write(changes), set[str]()
    for reader in (checkpoint.read, DraftModel.from_pretrained):
        with pytest.raises(error, match=sentence) as refusal:
            reader(str(folder))
        assert type(refusal.value) is error
        said.add(str(refusal.value))
    assert len(said) == 1
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(error, match=sentence):
        checkpoint.parse(config, str(folder))


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 1},
        {"target_layer_ids": ()},
        {"target_layer_ids": (2, 0)},
        {"target_layer_ids": (-1, 0)},
        {"num_key_value_heads": 3},
        {"layer_types": (FULL,)},
        {"layer_types": (FULL, "linear_attention")},
        {"layer_types": (FULL, SLIDING)},
        {"layer_types": (FULL, SLIDING), "sliding_window": 4},
    ],
    ids=str,
)
def test_what_would_be_refused_cannot_be_trained(wrong: dict[str, Any], write: Callable) -> None:
    right = checkpoint.read(str(write({})))
    with pytest.raises(ValueError, match="the draft: "):
        replace(right, path="the draft", **wrong)


def test_every_field_is_written(write: Callable) -> None:
    """A field that `to_json` left out would come back as its default."""
    other = replace(
        checkpoint.read(str(write({}))), rms_norm_eps=1e-5, attention_bias=True, max_position_embeddings=64,
        rope_parameters={"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}, layer_types=(SLIDING, SLIDING),
        sliding_window=9, num_target_layers=None, dtype="float16",
    )  # fmt: skip
    defaults = {field.name: field.default for field in fields(Checkpoint)}
    assert [name for name, value in vars(other).items() if value == defaults[name]] == []
    assert checkpoint.parse(json.loads(json.dumps(other.to_json())), "written") == other


def test_the_public_name_is_the_record() -> None:
    assert DraftConfig is Checkpoint
