"""Dialects of config.json by other trainers must be read as the same draft, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft.dialects import is_draft, names_draft
from sglang_dflash.errors import NotSupported
from tests.fixtures.checkpoints import DRAFT, write_draft

INNER, OUTER = DRAFT["dflash_config"], ("architectures", "block_size", "dflash_config", "num_target_layers")
LAYERS = {name: value for name, value in DRAFT.items() if name not in OUTER}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYERS,
    "aux_hidden_state_layer_ids": [id_ + 1 for id_ in INNER["target_layer_ids"]],
    "draft_vocab_size": LAYERS["vocab_size"],
    "block_size": DRAFT["block_size"],
    "mask_token_id": INNER["mask_token_id"],
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {"algorithm": "dflash"},
}
DEEPSPEC = {name: value for name, value in DRAFT.items() if name != "dflash_config"} | {
    "architectures": ["Qwen3DSparkModel"],
    "markov_rank": 0,
    "num_anchors": 512,
    "enable_confidence_head": False,
    "sample_from_anchor": False,
    **INNER,
}
DEEPSPEC_NESTED = {name: value for name, value in DEEPSPEC.items() if name not in INNER} | {"dflash_config": INNER}


def write(folder: Path, config: dict[str, Any]) -> Path:
    write_draft(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        SPECULATORS,
        SPECULATORS | {"architectures": ["DFlashDraftModel"]},
        {name: SPECULATORS[name] for name in SPECULATORS.keys() - {"speculators_model_type", "draft_vocab_size"}},
        DEEPSPEC,
        DEEPSPEC_NESTED,
        DEEPSPEC | {"dflash_config": dict.fromkeys(INNER)},
        DRAFT | {"markov_rank": 0, "num_anchors": 512, "enable_confidence_head": False},
        DRAFT | {"sample_from_anchor": False, "query_zero_predicts_next": None},
        DRAFT | {"num_experts": 0, "gating": False},
    ],
    ids=[
        "speculators",
        "flat",
        "speculators, older",
        "DeepSpec",
        "DeepSpec, nested",
        "DeepSpec, null",
        "DeepSpec, exported",
        "declared",
        "without experts",
    ],
)
def test_other_dialects_are_read_as_the_same_draft(config, tmp_path):
    read = checkpoint.read(str(write(tmp_path / "other", config)))
    ours = checkpoint.read(str(write_draft(tmp_path / "ours")))
    converted = {"num_target_layers": 4} | read.to_json()  # speculators does not write num_target_layers
    converted["dflash_config"].pop("embeds_scaled", None)  # speculators trains on unscaled embeddings
    assert converted == ours.to_json()
    assert is_draft(read.path)


OPEN_SPEC = LAYERS | {
    "architectures": ["DflashDraftModel"],
    "open_spec_config_version": "0.0.0",
    "speculators_metadata": {"speculators_version": "0.6"},
    "speculative_config": {
        "method": "dflash", "speculative_tokens": 7, "target_layer_ids": [1, 3], "target_layer_start_idx": 1,
        "mask_token_id": INNER["mask_token_id"], "sample_from_anchor": False, "sliding_window_non_causal": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (SPECULATORS, {"embeds_scaled": False}),
        (DRAFT, {"embeds_scaled": True}),
        (OPEN_SPEC, {"embeds_scaled": False, "block_size": 8, "target_layer_ids": (0, 2), "n_drafts": 7}),
        (SPECULATORS | {"sample_from_anchor": True}, {"sample_from_anchor": True, "n_drafts": 8}),
        (DEEPSPEC | {"sample_from_anchor": None}, {"sample_from_anchor": True, "n_drafts": 8}),
        (DEEPSPEC, {"sample_from_anchor": False, "n_drafts": 7}),
        (DEEPSPEC_NESTED | {"sample_from_anchor": True}, {"sample_from_anchor": True}),
        (DRAFT | {"query_zero_predicts_next": True}, {"sample_from_anchor": True}),
        (DRAFT | {"dflash_config": INNER | {"sample_from_anchor": True}}, {"sample_from_anchor": True}),
        (DRAFT | {"dflash_config": INNER | {"causal_head": True}}, {"full_is_causal": True}),
        (DRAFT | {"dflash_config": INNER | {"causal": True}}, {"full_is_causal": True}),
        (DRAFT | {"dflash_config": INNER | {"causal": False, "causal_head": False}}, {"full_is_causal": False}),
        (DRAFT | {"is_causal": True}, {"full_is_causal": True, "sliding_is_causal": True}),
        (
            DRAFT | {"dflash_config": INNER | {"use_swa": True, "swa_window_size": 32}},
            {"layer_windows": (32, 32), "sliding_is_causal": False},
        ),
        (
            DRAFT | {"dflash_config": INNER | {"use_swa": True, "swa_window_size": 32, "causal": True}},
            {"layer_windows": (32, 32), "sliding_is_causal": True},
        ),
        (
            DRAFT | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
            | {"dflash_config": INNER | {"use_swa": True, "swa_window_size": 32}},
            {"layer_windows": (32, None), "sliding_is_causal": True},
        ),
        (
            {name: DRAFT[name] for name in DRAFT if name != "dflash_config"} | INNER
            | {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
            | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32},
            {"sliding_is_causal": False, "architecture": "MuseGlimmerAssistantModel"},
        ),
        (DRAFT | {"architectures": ["Qwen3DFlashDraftModel"]}, {"architecture": "Qwen3DFlashDraftModel"}),
        (DRAFT | {"draft_vocab_size": 128}, {"draft_vocab_size": None}),
    ],
    ids=lambda fields: str(fields) if len(fields) < 5 else "read as",  # a config has more fields
)  # fmt: skip
def test_kinds_are_read_from_the_fields_that_declare_them(config, fields, tmp_path):
    draft = checkpoint.read(str(write(tmp_path, config)))
    assert {name: getattr(draft, name) for name in fields} == fields
    assert checkpoint.parse(draft.to_json(), draft.path) == draft


def test_sliding_layers_that_see_their_block(tmp_path):
    layers = LAYERS | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    config = SPECULATORS | {"transformer_layer_config": layers}
    for both_ways in (True, False):
        draft = checkpoint.read(str(write(tmp_path, config | {"sliding_window_non_causal": both_ways})))
        assert (draft.sliding_is_causal, draft.layer_windows) == (not both_ways, (32, None))


def test_an_outer_dtype_is_used(tmp_path):
    assert checkpoint.read(str(write(tmp_path, SPECULATORS | {"torch_dtype": "float32"}))).dtype == "float32"


def nested(**fields: Any) -> dict[str, Any]:
    return SPECULATORS | {"transformer_layer_config": LAYERS | fields}


@pytest.mark.parametrize(
    ("config", "error", "sentence"),
    [
        (SPECULATORS | {"speculators_model_type": "dspark"}, NotSupported, "speculators_model_type is 'dspark', not"),
        (SPECULATORS | {"draft_vocab_size": 64}, ValueError, "1 of 26 tensors are missing, the first is d2t"),
        (
            SPECULATORS | {"aux_hidden_state_layer_ids": [0, 2]}, ValueError,
            r"_ids is \[0, 2\], not a list .* from 1 on",
        ),
        (SPECULATORS | {"aux_hidden_state_layer_ids": None}, ValueError, "aux_hidden_state_layer_ids is None"),
        (SPECULATORS | {"transformer_layer_config": None}, ValueError, "no transformer_layer_config; save the draft"),
        (SPECULATORS | {"quantization_config": {"quant_method": "awq"}}, NotSupported, "is awq: quantized drafts are"),
        (nested(quantization_config={"format": "mxfp4"}), NotSupported, "is mxfp4 with no config_groups: quantized"),
        (DEEPSPEC | {"markov_rank": 256}, NotSupported, "markov_rank 256 is DSpark; serve it with --spec"),
        (
            DEEPSPEC_NESTED | {"markov_rank": None, "dflash_config": INNER | {"markov_rank": 256}}, NotSupported,
            "markov_rank 256 is DSpark; serve it with --spec",
        ),
        (
            {name: DEEPSPEC[name] for name in DEEPSPEC} | {"model_type": "gemma4_text"}, NotSupported,
            "model_type='gemma4_text' is not DFlash",
        ),
        (SPECULATORS | {"aux_hidden_state_layer_ids": []}, ValueError, r"layer_ids is \[\], not a list of layer numb"),
        (SPECULATORS | {"block_size": None}, ValueError, "config.json has no block_size; add it$"),
        (SPECULATORS | {"mask_token_id": None}, ValueError, "config.json has no mask_token_id; add it$"),
        (nested(head_dim=None), ValueError, "config.json has no head_dim; add it to transformer_layer_config$"),
        (DRAFT | {"markov_rank": 4}, NotSupported, "markov_rank=4 is not DFlash .*; give a DFlash draft$"),
        (DRAFT | {"enable_confidence_head": True}, NotSupported, "enable_confidence_head=True is not DFlash"),
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_dialects_are_refused_by_name(config, error, sentence, tmp_path):
    with pytest.raises(error, match=sentence) as refusal:
        checkpoint.read(str(write(tmp_path, config)))
    assert type(refusal.value) is error
    assert "\n" not in str(refusal.value)


def test_a_target_is_not_recognised_as_a_draft():
    assert not names_draft({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    assert not names_draft({"architectures": None})
    assert not names_draft({"architectures": ["DSparkDraftModel"]})  # DSpark, which SGLang itself serves


def test_sglang_reads_a_dialect_through_this_reader(tmp_path):
    """SGLang's own reader refuses a draft saved by `speculators`, because its config.json has no known `model_type`."""
    from sglang.srt.utils.hf_transformers.config import get_config

    from sglang_dflash.engine.draft.sglang_config import read_draft

    folder = write(tmp_path / "draft", SPECULATORS)
    with pytest.raises(ValueError, match="model_type"):
        get_config(str(folder), trust_remote_code=False)
    config = read_draft(get_config, str(folder), trust_remote_code=False)
    assert config.architectures == ["DFlashDraftModel"]
    assert config.dflash_config["target_layer_ids"] == INNER["target_layer_ids"]
    unknown = write(tmp_path / "unknown", {"architectures": ["SomeModel"]})
    with pytest.raises(ValueError, match="model_type"):
        read_draft(get_config, str(unknown), trust_remote_code=False)
