"""Configs of published drafts: the fields that decide how each is read, and the reason why others are refused."""

from typing import Any

import pytest

from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft.packed import Packing
from sglang_dflash.errors import NotSupported

FULL, SLIDING = "full_attention", "sliding_attention"


def sizes(hidden: int, layers: int, heads: int, kv_heads: int, inner: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "intermediate_size": inner, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16",
    }  # fmt: skip


MUSE = sizes(6656, 5, 32, 8, 19968) | {
    "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "block_size": 16,
    "layer_types": [SLIDING] * 5, "sliding_window": 2048, "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49], "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}  # fmt: skip
LAGUNA = sizes(3072, 6, 72, 8, 12288) | {
    "architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "layer_types": [SLIDING] * 6,
    "sliding_window": 512, "sliding_windows": [512] * 6, "vocab_size": 100352, "draft_vocab_size": 100352,
    "rope_theta": 500000.0, "gating": "per-head", "num_experts": 0,
    "eagle_aux_hidden_state_layer_ids": [2, 11, 20, 30, 39, 48],
    "dflash_config": {
        "block_size": 16, "mask_token_id": 12, "num_target_layers": 48, "causal": True,
        "target_layer_ids": [1, 10, 19, 29, 38, 47],
    },
}  # fmt: skip
MIMO = sizes(6144, 5, 128, 8, 16384) | {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "v_head_dim": 128, "partial_rotary_factor": 0.5,
    "block_size": 8, "num_target_layers": 70, "vocab_size": 152064, "rope_theta": 10000, "sliding_window": 1024,
    "dflash_config": {
        "target_layer_ids": [0, 15, 31, 47, 69], "mask_token_id": 151669, "num_anchors": 4096, "block_size": 8,
        "loss_decay_gamma": 7.0, "use_swa": True, "swa_window_size": 1024, "backbone_rotary_base": 5000000,
        "attention_value_scale": 0.612, "attention_sink_bias": True,
    },
}  # fmt: skip
MIMO_2_6 = MIMO | {
    "layer_types": [SLIDING] * 5, "use_sliding_window": True, "is_causal": False, "target_hidden_size": 6144,
    "add_swa_attention_sink_bias": True,
    "dflash_config": {
        "target_layer_ids": [0, 15, 31, 47, 69], "mask_token_id": 151675, "num_anchors": 4096, "block_size": 8,
        "loss_decay_gamma": 7.0, "attention_value_scale": 0.612, "attention_sink_bias": True,
    },
}  # fmt: skip
NEMOTRON = sizes(2688, 6, 32, 2, 6144) | {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_sink_bias": False,
    "dflash_query_causal": False, "draft_vocab_size": None, "has_embed_tokens": True, "has_lm_head": False,
    "layer_types": [FULL] * 6, "sliding_window": None, "vocab_size": 131072, "mask_token_id": 990,
    "target_layer_ids": [1, 5, 19, 29, 41, 51], "sample_from_anchor": False, "rope_theta": 10000,
    "rope_parameters": {
        "factor": 128.0, "original_max_position_embeddings": 8192, "rope_theta": 10000, "rope_type": "yarn",
    },
    "dflash_config": {
        "attention_sink_bias": False, "causal": False, "mask_token_id": 990, "use_swa": False,
        "target_layer_ids": [1, 5, 19, 29, 41, 51], "sample_from_anchor": False,
    },
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
}  # fmt: skip
DEEPSPEC = sizes(4096, 5, 32, 8, 12288) | {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_target_layers": 36, "block_size": 7,
    "layer_types": [FULL] * 5, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "num_anchors": 512,
    "enable_confidence_head": False, "markov_rank": 0, "vocab_size": 151936, "use_sliding_window": False,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}  # fmt: skip
RED_HAT = {
    "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 8, "mask_token_id": 151669,
    "aux_hidden_state_layer_ids": [1, 12, 23, 34, 45], "draft_vocab_size": 32000,
    "transformer_layer_config": sizes(2048, 5, 32, 4, 6144)
    | {"model_type": "llama", "vocab_size": 151936, "layer_types": [SLIDING] * 5, "sliding_window": 2048},
}  # fmt: skip
DOMINO = sizes(4096, 5, 32, 8, 12288) | {
    "architectures": ["DominoDraftModel"], "model_type": "qwen3", "block_size": 16, "vocab_size": 151936,
    "num_target_layers": 36, "rope_theta": 1000000, "emb_dim": 256,
    "dflash_config": {
        "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "projector_type": "domino",
        "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": True,
    },
}  # fmt: skip
JETSPEC = sizes(4096, 5, 32, 8, 12288) | {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "num_target_layers": 36,
    "dflash_config": {"causal_head": True, "target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
}  # fmt: skip

READ = {
    "Muse Glimmer": (MUSE, {"sliding_is_causal": False, "window": 2048, "block_size": 16}),
    "Laguna": (
        LAGUNA,
        {"norms_features": True, "gating": "per-head", "sliding_is_causal": True, "draft_vocab_size": None},
    ),
    "Nemotron": (NEMOTRON, {"has_embed_tokens": True, "block_size": 16, "full_is_causal": False}),
    "DeepSpec": (DEEPSPEC, {"sample_from_anchor": True, "n_drafts": 7}),
    "RedHatAI": (RED_HAT, {"draft_vocab_size": 32000, "embeds_scaled": False, "target_layer_ids": (0, 11, 22, 33, 44)}),
    "Domino": (DOMINO, {"gru_hidden_dim": 1024, "emb_dim": 256, "shift_label": True, "n_drafts": 15}),
    "MiMo": (
        MIMO,
        {"attention_sink_bias": True, "attention_value_scale": 0.612, "rotary_width": 64, "window": 1024, "n_drafts": 7}
        | {"sliding_is_causal": False, "head_dim": 128},
    ),
    "MiMo of September": (
        MIMO_2_6,
        {"attention_sink_bias": True, "rotary_width": 64, "window": 1024, "sliding_is_causal": False},
    ),
    "JetSpec": (JETSPEC, {"full_is_causal": True, "n_drafts": 15}),
}


@pytest.mark.parametrize("name", READ)
def test_a_published_config_is_read(name: str) -> None:
    config, fields = READ[name]
    draft = checkpoint.parse(config, name)
    assert {field: getattr(draft, field) for field in fields} == fields


def test_nemotrons_weights_are_read_as_nvfp4() -> None:
    assert checkpoint.parse(NEMOTRON, "it").packing == Packing(
        "modelopt, W4A16_NVFP4", "U8", 4, (1, 16), ("weight", "weight_scale", "weight_scale_2")
    )


REFUSED = {
    "a Markov head": (DEEPSPEC | {"markov_rank": 256}, "is DSpark; serve it with --speculative-algorithm DSPARK"),
    "Gemma's DeepSpec": (
        DEEPSPEC | {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"},
        "model_type='gemma4_text' is not DFlash",
    ),
    "latent attention": (JETSPEC | {"dflash_config": JETSPEC["dflash_config"] | {"attention_mode": "mla"}}, "not gqa"),
    "DFlare": (JETSPEC | {"architectures": ["DFlareQwen3Model"]}, "architecture is DFlareQwen3Model, not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_published_config_is_refused_for_its_reason(name: str) -> None:
    config, sentence = REFUSED[name]
    with pytest.raises(NotSupported, match=sentence):
        checkpoint.parse(config, name)
