"""Checks of a draft's config that reject other drafters.

Other drafters share DFlash's checkpoint layout and even its architecture name. Without these checks they would be
loaded as DFlash without an error, and hardly any draft would be accepted.
"""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.engine.draft import lilicorr_fields
from sglang_dflash.errors import STOCK, NotSupported

DFLASH, DFLASH_2 = "DFlashDraftModel", "DFlash2DraftModel"
LAGUNA = "DFlashLagunaForCausalLM"  # DFlash with a gate, and with norms for features and context
# Network (DFlash or DFlash 2) by architecture name. SGLang uses some of the names for drafts of a single target.
ARCHITECTURES = {
    DFLASH: DFLASH,
    "Qwen3DFlashDraftModel": DFLASH,  # trainer NeMo Automodel, as the next
    "Qwen3DFlash2DraftModel": DFLASH_2,
    "MuseGlimmerAssistantModel": DFLASH,
    LAGUNA: DFLASH,
    "DominoDraftModel": DFLASH,  # trainer SpecForge
    lilicorr_fields.LILICORR: DFLASH,
    DFLASH_2: DFLASH_2,
    "DFlash2BeamDraftModel": DFLASH_2,
    "MiniMaxDFlash2DraftModel": DFLASH_2,
}

# Fields that are true if the output of slot i predicts the token of slot i + 1 ("anchor-first"). In z-lab's drafts it
# predicts the token of slot i, and slot 0 only holds the anchor.
ANCHOR_FIRST = ("sample_from_anchor", "query_zero_predicts_next")

# Fields of Domino in `dflash_config`. `pure_draft_prefix_len`, the number of first drafts without a correction, must be
# 1.
DOMINO = ("shift_label", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")

# Names of other drafters, by the keys (or prefixes of keys) that they have in `dflash_config`.
VARIANT_KEYS = {
    "markov_": "DSpark",
    "enable_confidence": "DSpark",
}

GIVE = "give a DFlash draft"
# Keys of config.json that must equal another key, if both are given.
EQUAL = {"target_hidden_size": "hidden_size", "v_head_dim": "head_dim"}
# Architectures of drafts that SGLang serves as another algorithm.
DSPARK = ("DSparkDraftModel", "Lfm2DSparkDraftModel", "DSparkMiniMaxDraftModel")

# Keys that `dflash_config` may have. `output_multiplier` and `final_logit_softcapping` keep the order of logits. So for
# DFlash they change no draft, but for DFlash 2 they change the selector's scores.
KEYS = {
    "block_size",
    "mask_token",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "causal",
    "attention_mode",
    "projector_type",
    "output_multiplier",
    "final_logit_softcapping",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "causal_head",
    "use_swa",
    "swa_window_size",
    "draft_vocab_size",
    "embeds_scaled",
    "attention_sink_bias",
    "attention_value_scale",
    *ANCHOR_FIRST,
    *DOMINO,
    *lilicorr_fields.FIELDS,
}
# Keys of `dflash_config` that trainers write and that do not change what a draft computes.
TRAINING_KEYS = {
    "num_anchors",  # blocks per training text
    "loss_decay_gamma",
    "backbone_rotary_base",  # the target's rope
    "runtime_block_size",  # block of the trainer's own evaluation
}

# Keys of config.json that change the computation, each with its only supported value. Null is accepted too.
TOP_LEVEL = {
    "model_type": "qwen3",  # a DFlash draft has Qwen3's layers for any target
    "has_lm_head": False,
    "num_experts": None,
    "markov_rank": 0,
    "enable_confidence_head": False,
    "input_embedding_scale": 1.0,
    "use_aux_hidden_state": True,
}


def refuse_variants(config: Mapping[str, Any], path: str) -> None:
    """Check that the computation of a draft is DFlash's.

    Raises:
        NotSupported: the draft is another drafter's, or requires a part that DFlash does not have.
        ValueError: `architectures` is not a list, or `config` has no `dflash_config`.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"{path}: architectures is {architectures!r}, not a list; fix config.json")
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        cure = "serve it with --speculative-algorithm DSPARK" if {*architectures} & {*DSPARK} else GIVE
        raise NotSupported(
            f"{path}: architecture is {', '.join(architectures) or 'missing'}, not {DFLASH} or {DFLASH_2}; {cure}"
        )
    dflash = config.get("dflash_config")
    if not isinstance(dflash, dict):
        raise ValueError(
            f"{path}: config.json has no dflash_config object; move mask_token_id and target_layer_ids into one, or "
            f"give a DFlash draft, or {STOCK}"
        )
    projector = dflash.get("projector_type", config.get("projector_type"))
    if projector not in (None, "dflash", "dflash2", "domino", "lilicorr"):
        raise NotSupported(f"{path}: projector_type={projector!r} is not DFlash; {GIVE}")
    if projector == "domino" and dflash.get("pure_draft_prefix_len") != 1:
        raise NotSupported(
            f"{path}: pure_draft_prefix_len={dflash.get('pure_draft_prefix_len')!r} is not 1 (Domino corrects every "
            f"draft but the first); {GIVE}"
        )
    if projector == "domino" and not isinstance(dflash.get("shift_label"), bool):
        raise ValueError(f"{path}: config.json has no shift_label; add true or false, as the draft was trained")
    for key, value in dflash.items():
        if key not in KEYS | TRAINING_KEYS and value not in (None, False, 0, TOP_LEVEL.get(key)):
            _refuse_key(path, key, value)
    if dflash.get("attention_mode", "gqa") not in ("gqa", "mha"):
        raise NotSupported(f"{path}: dflash_config.attention_mode={dflash['attention_mode']!r} is not gqa; {GIVE}")
    for key, expected in TOP_LEVEL.items():
        value = config.get(key, expected)
        if value not in (expected, None) and (value or expected is not None):
            wanted = repr(expected) if expected is not None else f"no {key}"
            raise NotSupported(f"{path}: {key}={value!r} is not DFlash (which has {wanted}); {GIVE}")
    _refuse_unequal(config, path)


def _refuse_unequal(config: Mapping[str, Any], path: str) -> None:
    for key, other in EQUAL.items():
        value, expected = config.get(key), config.get(other)
        if None not in (value, expected) and value != expected:
            raise NotSupported(f"{path}: {key} {value} is not {other} {expected}, as in DFlash; {GIVE}")


def _refuse_key(path: str, key: str, value: Any) -> None:
    variant = next((name for mark, name in VARIANT_KEYS.items() if key.startswith(mark)), "")
    unknown = f"remove the field if it does not change what the draft computes, else {GIVE}"
    raise NotSupported(
        f"{path}: dflash_config.{key}={value!r} is not DFlash, but {variant or 'an unknown variant'}; "
        f"{GIVE if variant else unknown}"
    )
