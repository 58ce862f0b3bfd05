"""What a DFlash config.json means, in both spellings, and what is refused."""

import json

import pytest

from sglang_dflash.model import DraftConfig

CARD = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 100,
    "rope_theta": 1_000_000,
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"target_layer_ids": [1, 9], "mask_token_id": 99},
}


def changed(**fields):
    return CARD | fields


def test_a_card_is_read():
    config = DraftConfig.from_json(CARD)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1_000_000}
    assert config.layer_types == ("full_attention", "full_attention")
    assert config.feature_size == 128
    assert config.sliding_window is None
    assert [config.layer_is_causal(i) for i in range(2)] == [False, False]


def test_old_and_new_spelling_are_one():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 512}
    old = DraftConfig.from_json(changed(rope_scaling={"type": "yarn", **yarn}))
    new = DraftConfig.from_json(
        {name: value for name, value in CARD.items() if name not in ("rope_theta", "block_size")}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1_000_000, **yarn},
            "dflash_config": CARD["dflash_config"] | {"block_size": 16},
        }
    )
    assert old == new


def test_the_block_size_of_dflash_config_wins():
    both = changed(block_size=8, dflash_config=CARD["dflash_config"] | {"block_size": 16})
    assert DraftConfig.from_json(both).block_size == 16


def test_fields_copied_from_the_target_do_not_bend_the_rope():
    rope = {
        "rope_theta": 10_000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
    config = DraftConfig.from_json(changed(rope_parameters=rope))
    assert config.rope_parameters == {"rope_theta": 10_000.0, "rope_type": "default"}


def test_sliding_layers_are_causal_unless_the_checkpoint_says():
    layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 2048}
    config = DraftConfig.from_json(changed(**layers))
    assert [config.layer_is_causal(i) for i in range(2)] == [False, True]
    assert [config.layer_window(i) for i in range(2)] == [None, 2048]
    said = DraftConfig.from_json(changed(**layers, is_causal=False))
    assert [said.layer_is_causal(i) for i in range(2)] == [False, False]


@pytest.mark.parametrize(
    "extra", [{}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": True}]
)
def test_what_is_written_is_read_back(extra):
    config = DraftConfig.from_json(changed(**extra))
    assert DraftConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"block_size": None}, "block_size is missing"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "dflash_config.mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": 99}}, "dflash_config.target_layer_ids is missing"),
        ({"dflash_config": {"mask_token_id": 100, "target_layer_ids": [1]}}, "mask_token_id 100 lies outside"),
        ({"dflash_config": CARD["dflash_config"] | {"target_layer_ids": [-1]}}, r"target_layer_ids \[-1\]"),
        ({"dflash_config": CARD["dflash_config"] | {"conv_kernel_size": 3}}, "conv_kernel_size is 3"),
        ({"dflash_config": CARD["dflash_config"] | {"selector_rank": 64}}, "selector_rank is 64"),
        ({"dflash_config": CARD["dflash_config"] | {"projector_type": "domino"}}, "projector_type is 'domino'"),
        ({"hidden_act": "swigluoai"}, "hidden_act is 'swigluoai'"),
        ({"use_gemma_norm": True}, "use_gemma_norm is True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "default", "rope_dim": 8}}, "rope_dim is 8 and head_dim 32"),
        ({"layer_types": ["full_attention"]}, "give each of the 2 draft layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "give each of the 2 draft layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is not set"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ],
)
def test_what_cannot_be_a_dflash_draft_is_refused_by_name(fields, said):
    with pytest.raises(ValueError, match=said):
        DraftConfig.from_json(changed(**fields))


def test_the_file_is_named_in_the_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        DraftConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        DraftConfig.from_folder(tmp_path)
