"""Server and PyTorch reference must read equal fields from a config.json, also from one that the draft has saved.

Both must refuse the same files.
"""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft.lilicorr_fields import LiLiCorrSizes
from sglang_dflash.engine.draft.packed import Packing
from sglang_dflash.engine.draft.record import FULL, SLIDING, Checkpoint
from sglang_dflash.engine.draft.variants import LAGUNA
from sglang_dflash.errors import NotSupported
from sglang_dflash.reference.torch import DraftModel
from tests.fixtures.checkpoints import SECOND

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
WINDOW = {"sliding_window": 32, "use_sliding_window": True}

# Changes to the config.json of `fixtures/checkpoints.py` (None removes a field) and the fields as read, by case.
ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unchanged": ({}, {"layer_types": (FULL, FULL), "sliding_window": None, "rope_parameters": ROPE, "block_size": 8}),
    "output_multiplier": ({"dflash_config": {"output_multiplier": 0.5}}, {"output_multiplier": 0.5}),
    "final_logit_softcapping": (
        {"dflash_config": {"final_logit_softcapping": 30.0}}, {"final_logit_softcapping": 30.0},
    ),
    "no soft cap": ({"dflash_config": {"final_logit_softcapping": 0.0}}, {"final_logit_softcapping": None}),
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"], "dflash_config": SECOND}, SECOND),
    "DFlash 2 as MiniMax model": (
        {"architectures": ["MiniMaxDFlash2DraftModel"], "dflash_config": SECOND}, SECOND,
    ),
    "a selector without a convolution": (
        {"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_rank": 8, "selector_top_k": 4}},
        {"conv_kernel_size": 0, "selector_rank": 8},
    ),
    "a convolution without a selector": (
        {"dflash_config": {"conv_kernel_size": 3, "conv_group_size": 8}}, {"conv_kernel_size": 3, "selector_rank": 0},
    ),
    "sliding layers that see their block": (
        WINDOW | {"layer_types": [SLIDING, SLIDING], "is_causal": False},
        {"layer_windows": (32, 32), "sliding_is_causal": False},
    ),
    "sliding layers that see their block, and full layers": (
        WINDOW | {"layer_types": [SLIDING, FULL], "is_causal": False},
        {"layer_windows": (32, None), "sliding_is_causal": False},
    ),
    "is_causal given twice": (
        WINDOW | {"layer_types": [SLIDING, FULL], "is_causal": False, "dflash_config": {"causal": False}},
        {"sliding_is_causal": False},
    ),
    "a window as long as the block": (
        WINDOW | {"layer_types": [SLIDING, FULL], "sliding_window": 8}, {"sliding_window": 8},
    ),
    "DFlash 2 as Beam model": ({"architectures": ["DFlash2BeamDraftModel"], "dflash_config": SECOND}, SECOND),
    "DFlash as MuseGlimmer model": ({"architectures": ["MuseGlimmerAssistantModel"]}, {"selector_rank": 0}),
    "mask_token_id at the top": ({"mask_token_id": 5, "dflash_config": {"mask_token_id": None}}, {"mask_token_id": 5}),
    "block_size in two places": ({"block_size": 16, "dflash_config": {"block_size": 4}}, {"block_size": 4}),
    "num_target_layers in dflash_config": (
        {"num_target_layers": None, "dflash_config": {"num_target_layers": 4}}, {"num_target_layers": 4},
    ),
    "no num_target_layers": ({"num_target_layers": None}, {"num_target_layers": None}),
    "no vocab_size": ({"vocab_size": None}, {"vocab_size": None}),
    "no layer_types": ({"layer_types": None}, {"layer_types": (FULL, FULL)}),
    "no model_type": ({"model_type": None}, {}),
    "another epsilon": ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-5}),
    "torch_dtype float16": ({"dtype": None, "torch_dtype": "float16"}, {"dtype": "float16"}),
    "no dtype": ({"dtype": None}, {"dtype": "bfloat16"}),
    "the target's rotary fields, with rope_dim": (
        {"partial_rotary_factor": 0.25, "rope_parameters": ROPE | {"rope_dim": 16, "mrope_section": [3, 3, 2]}},
        {"rope_parameters": ROPE},
    ),
    "a part of each head rotates": (
        {"rope_parameters": ROPE | {"rope_dim": 8}}, {"rope_parameters": ROPE | {"rope_dim": 8}},
    ),
    "rotary fields of transformers 4": (
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    ),
    "a window": (
        WINDOW | {"layer_types": [SLIDING, FULL]}, {"layer_types": (SLIDING, FULL), "layer_windows": (32, None)},
    ),
    "a window that no layer has": (WINDOW, {"sliding_window": None, "layer_windows": (None, None)}),
    "sliding layers, is_causal true as by default": (
        WINDOW | {"layer_types": [SLIDING, SLIDING], "is_causal": True}, {"layer_windows": (32, 32)},
    ),
    "causal full layers": ({"dflash_config": {"causal": True}}, {"full_is_causal": True}),
    "is_causal full layers": ({"is_causal": True}, {"full_is_causal": True}),
    "sliding layers, causal only in dflash_config": (
        WINDOW | {"layer_types": [SLIDING, SLIDING], "dflash_config": {"causal": False}}, {"sliding_is_causal": False},
    ),
    "one is_causal for layers of two kinds": (
        WINDOW | {"layer_types": [SLIDING, FULL], "is_causal": True},
        {"sliding_is_causal": True, "full_is_causal": True},
    ),
    "keys of trainers": (
        {"dflash_config": {"num_anchors": 512, "loss_decay_gamma": 7.0, "input_embedding_scale": 1.0}},
        {"target_layer_ids": (0, 2)},
    ),
    "full layers, causal false": ({"dflash_config": {"causal": False}}, {"layer_windows": (None, None)}),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], type[ValueError], str]] = {
    "mrope_section without rope_dim": (
        {"rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}}, NotSupported,
        "no rope_dim. .*; add rope_dim=16 to rope_parameters if",
    ),
    "partial_rotary_factor": (
        {"partial_rotary_factor": 0.25}, NotSupported, "has partial_rotary_factor or mrope_section, but no rope_dim",
    ),
    "rope_dim above the head": (
        {"rope_parameters": ROPE | {"rope_dim": 18}}, ValueError, "rope_dim is 18, not an even number up to the head",
    ),
    "rope_dim with a scaled rope": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "rope_dim": 8, **YARN}}, NotSupported,
        "rope_dim=8 with a scaled rope",
    ),
    "no num_key_value_heads": ({"num_key_value_heads": None}, ValueError, "config.json has no num_key_value_heads"),
    "no head_dim": ({"head_dim": None}, ValueError, "config.json has no head_dim; add it"),
    "no mask_token_id": ({"dflash_config": {"mask_token_id": None}}, ValueError, "config.json has no mask_token_id"),
    "block_size 1": ({"block_size": 1}, ValueError, "block_size is 1, not an integer of at least 2"),
    "use_sliding_window alone": (WINDOW | {"layer_types": None}, ValueError, "use_sliding_window is set without layer"),
    "a window below the block": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 4},
        ValueError, "sliding_window 4 is smaller than block_size 8; fix config.json",
    ),
    "gating": ({"gating": "x"}, NotSupported, "gating is 'x', not one of True, 'per-head', 'per-element', False"),
    "one of Domino's sizes": (
        {"dflash_config": {"gru_hidden_dim": 8}}, ValueError, "sets only one of gru_hidden_dim and emb_dim",
    ),
    "Domino with two plain drafts": (
        {"dflash_config": {"projector_type": "domino", "pure_draft_prefix_len": 2}}, NotSupported,
        "pure_draft_prefix_len=2 is not 1",
    ),
    "Domino without shift_label": (
        {"dflash_config": {"projector_type": "domino", "pure_draft_prefix_len": 1}}, ValueError,
        "config.json has no shift_label; add true or false",
    ),
    "markov_order": ({"dflash_config": {"markov_order": 2}}, NotSupported, "DFlash, but DSpark; give a DFlash draft$"),
    "num_experts": ({"num_experts": 8}, NotSupported, "num_experts=8 is not DFlash"),
    "another architecture": (
        {"architectures": ["DSparkDraftModel"]},
        NotSupported, "architecture is DSparkDraftModel, not DFlashDraftModel or DFlash2DraftModel",
    ),
    "two architectures": (
        {"architectures": ["DFlashDraftModel", "DFlash2DraftModel"]}, NotSupported, "architecture is DFlashDr.*, DFla",
    ),
    "DFlash 2 without a selector": (
        {"architectures": ["DFlash2DraftModel"]}, ValueError,
        "DFlash2DraftModel is DFlash 2, but selector_rank is 0 or missing; write",
    ),
    "DFlash with a selector": (
        {"dflash_config": {"selector_rank": 8, "selector_top_k": 4}}, ValueError,
        "selector_rank is 8, but DFlashDraftModel has no candidate selector; correct",
    ),
    "candidates without a rank": (
        {"dflash_config": {"selector_top_k": 4}}, ValueError,
        "config.json sets only one of selector_rank and selector_top_k",
    ),
    "groups without taps": (
        {"dflash_config": {"conv_group_size": 16}}, ValueError,
        "config.json sets only one of conv_kernel_size and conv_group_size",
    ),
    "groups that do not fit": (
        {"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 12}}, ValueError, "12 does not divide hidden_size",
    ),
    "more candidates than tokens": (
        {"architectures": ["DFlash2DraftModel"], "dflash_config": SECOND | {"selector_top_k": 200}},
        ValueError, "selector_top_k 200 exceeds vocab_size 128",
    ),
    "a selector without vocab_size": (
        {"architectures": ["DFlash2DraftModel"], "dflash_config": SECOND, "vocab_size": None},
        ValueError, "has selector_top_k, but no vocab_size; add vocab_size",
    ),
    "output_multiplier below 0": (
        {"dflash_config": {"output_multiplier": -1.0}}, ValueError, "output_multiplier -1.0 is not a number above 0",
    ),
    "output_multiplier, no number": (
        {"dflash_config": {"output_multiplier": "0.5"}}, ValueError, "output_multiplier '0.5' is not a number above 0",
    ),
    "input_embedding_scale": ({"input_embedding_scale": 2.0}, NotSupported, "input_embedding_scale=2.0 is not DFlash"),
    "another activation": ({"hidden_act": "gelu"}, NotSupported, "hidden_act='gelu' is not DFlash"),
    "swigluoai without its numbers": ({"hidden_act": "swigluoai"}, ValueError, "config.json has no swiglu_alpha"),
    "a head of its own": ({"has_lm_head": True}, NotSupported, "has_lm_head=True is not DFlash"),
    "another family": ({"model_type": "llama"}, NotSupported, r"='llama' is not DFlash \(which has 'qwen3'\)"),
    "no dflash_config": ({"dflash_config": None}, ValueError, "config.json has no dflash_config object"),
    "is_causal and causal differ": (
        {"is_causal": False, "dflash_config": {"causal": True}}, ValueError,
        "is_causal=False and dflash_config.causal=True contradict each other; keep the one",
    ),
    "a fused tensor of another size": (
        {"target_hidden_size": 32}, NotSupported, "target_hidden_size 32 is not hidden_size 64, as in DFlash",
    ),
}  # fmt: skip
LILICORR = LiLiCorrSizes(2, 4, 1, 2, 2.0, 4, 1e-6, 3.0)


@pytest.fixture
def write(checkpoints: ModuleType, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    return lambda changes: checkpoints.write_draft(tmp_path / "given", **changes)


@pytest.mark.parametrize("case", ACCEPTED)
def test_all_readers_agree(case: str, write: Callable, tmp_path: Path) -> None:
    changes, meaning = ACCEPTED[case]
    folder, trained = write(changes), tmp_path / "trained"
    server = checkpoint.read(str(folder))
    assert {name: vars(server).get(name, server.layer_windows) for name in meaning} == meaning
    plain = DraftModel.from_pretrained(folder)
    assert plain.config == server
    plain.save_pretrained(trained)
    # The saved file names the dtype of the tensors, and the fixture's tensors are bf16.
    written = replace(server, dtype="bfloat16")
    assert checkpoint.read(str(trained)) == DraftModel.from_pretrained(trained).config == written


@pytest.mark.parametrize("case", REFUSED)
def test_all_readers_refuse_alike(case: str, write: Callable) -> None:
    changes, error, sentence = REFUSED[case]
    folder, messages = write(changes), set[str]()
    for reader in (checkpoint.read, DraftModel.from_pretrained):
        with pytest.raises(error, match=sentence) as refusal:
            reader(str(folder))
        assert type(refusal.value) is error
        messages.add(str(refusal.value))
    (message,) = messages
    assert str(folder) in message
    assert "\n" not in message
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(error, match=sentence):
        checkpoint.parse(config, str(folder))


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("rope_parameters", {"partial_rotary_factor": 0.25}),
        ("rope_parameters", {"partial_rotary_factor": 0.25, "rope_parameters": None, "rope_theta": 1e6}),
        ("rope_scaling", {"rope_parameters": None, "rope_scaling": {"type": "default", "mrope_section": [3, 3, 2]}}),
    ],
)
def test_the_named_field_confirms_whole_heads(field: str, given: dict[str, Any], write: Callable) -> None:
    config = json.loads((write(given) / "config.json").read_text())
    with pytest.raises(NotSupported, match=f"add rope_dim=16 to {field} if it rotates whole heads"):
        checkpoint.parse(config, "the draft")
    config[field] = (config.get(field) or {}) | {"rope_dim": 16}
    assert checkpoint.parse(config, "the draft").rope_parameters["rope_type"] == "default"


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
        {"selector_rank": 8},
        {"selector_rank": 8, "selector_top_k": 200},
        {"conv_kernel_size": 2, "conv_group_size": 12},
        {"lilicorr": LILICORR._replace(num_heads=3)},
        {"lilicorr": LILICORR._replace(candidate_topk=200)},
        {"lilicorr": LILICORR, "sample_from_anchor": True},
        {"lilicorr": LILICORR, "gru_hidden_dim": 8, "emb_dim": 4},
    ],
    ids=str,
)
def test_an_invalid_checkpoint_cannot_be_constructed(wrong: dict[str, Any], write: Callable) -> None:
    right = checkpoint.read(str(write({})))
    with pytest.raises(ValueError, match="the draft: "):
        replace(right, path="the draft", **wrong)


def test_every_field_is_written(write: Callable) -> None:
    """A field that `to_json` omits would be read back as its default. Of the fields about files, none is written."""
    other = replace(
        checkpoint.read(str(write({}))), rms_norm_eps=1e-5, attention_bias=True, max_position_embeddings=64,
        rope_parameters={"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}, layer_types=(SLIDING, SLIDING),
        sliding_window=9, sliding_is_causal=False, num_target_layers=None, dtype="float16",
        **SECOND, output_multiplier=0.5, final_logit_softcapping=20.0, architecture="DFlash2DraftModel",
        has_embed_tokens=True, use_gemma_norm=True, rope_is_neox_style=False, hidden_act="swigluoai", swiglu_alpha=1.7,
        swiglu_limit=7.0,
        norms_features=True, gating="per-head", sample_from_anchor=True, embeds_scaled=False, has_mask_embedding=True,
        mask_file="mask_embedding.pt",
        attention_sink_bias=True, attention_value_scale=0.5,
        packing=Packing("fp8", "F8_E4M3", 8, (0, 0), ()),
    )  # fmt: skip
    laguna = replace(other, architecture=LAGUNA, **dict.fromkeys(SECOND, 0))
    plain = replace(laguna, architecture="DFlashDraftModel", norms_features=False)
    reduced = replace(
        plain, draft_vocab_size=5, sliding_is_causal=True, full_is_causal=True, layer_types=(FULL, SLIDING)
    )
    domino = replace(plain, gru_hidden_dim=8, emb_dim=4, shift_label=True, sample_from_anchor=False)
    lilicorr = replace(plain, architecture="LiLiCorrDraftModel", lilicorr=LILICORR, sample_from_anchor=False)
    written = [replace(other, norms_features=False), laguna, plain, reduced, domino, lilicorr]
    defaults = {field.name: field.default for field in fields(Checkpoint)}
    same = [{name for name, value in vars(one).items() if value == defaults[name]} for one in written]
    assert set.intersection(*same) == set()
    for one in written:
        assert checkpoint.parse(json.loads(json.dumps(one.to_json())), "written") == one
