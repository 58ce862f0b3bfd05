"""Conversion of a draft's `config.json` from the dialects of other trainers to z-lab's, which `checkpoint.py` reads.

vLLM's trainer `speculators` nests the fields of the layers in an object, and counts target layers from 1. The trainer
DeepSpec and Muse Glimmer's draft have fields at the top level, or nest some in `dflash_config`. JetSpec, NeMo Automodel
and ModelOpt have names of their own for attention masks. Some of these trainers also train other networks, which are
rejected.
"""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.engine.draft import files
from sglang_dflash.engine.draft.record import FULL, SECOND, SLIDING
from sglang_dflash.engine.draft.variants import ANCHOR_FIRST, ARCHITECTURES, DFLASH, DFLASH_2, LAGUNA
from sglang_dflash.errors import NotSupported

# Network by `speculators_model_type`, and architecture names of the trainer.
SPECULATORS_TYPES = {"dflash": DFLASH, "dflash2": DFLASH_2}
SPECULATORS = ("DFlashSpeculator", "DFlash2Speculator")
OPEN_SPEC = "DflashDraftModel"  # architecture name in the trainer's newer configs, "Open Spec Config"
DEEPSPEC = "DSparkModel"  # suffix of architecture names like Qwen3DSparkModel
MUSE = "muse_glimmer_assistant"  # model type
LAYERS = "transformer_layer_config"  # object in which speculators nests the fields of the layers
MIMO = "attention_value_scale"  # field of `dflash_config` by which MiMo's drafts are known
NESTED = ("mask_token_id", "target_layer_ids")  # fields of `dflash_config` that some trainers write at the top level


def names_draft(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json names an architecture of DFlash drafts, in any dialect."""
    names = config.get("architectures") or ()
    return (
        not {*ARCHITECTURES, *SPECULATORS, OPEN_SPEC}.isdisjoint(names)
        or any(str(name).endswith(DEEPSPEC) for name in names)
        or config.get("speculators_model_type") in SPECULATORS_TYPES
    )


def is_draft(path: str) -> bool:
    """Return whether the checkpoint's config names a DFlash draft; False if no config can be read."""
    try:
        config = files.read_config(path, None)
    except (ValueError, OSError):  # OSError: no permission, or a name that is too long
        return False
    return names_draft(config)


def in_our_words(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the config in z-lab's dialect.

    Raises:
        NotSupported: the draft is not DFlash.
        ValueError: a field of speculators' dialect is missing or malformed.
    """
    names = config.get("architectures") or ()
    if OPEN_SPEC in names:
        config = _of_open_spec(config, path)
    if LAYERS in config or "speculators_model_type" in config or not set(SPECULATORS).isdisjoint(names):
        config = _of_speculators(config, path)
    elif any(str(name).endswith(DEEPSPEC) for name in names):
        config = _of_deepspec(config, path)
    if config.get("model_type") == MUSE:  # its sliding layers look both ways
        config = {"is_causal": False, **config, "model_type": "qwen3"}
    if LAGUNA in names:
        config = {**config, "model_type": "qwen3"}
    config = _with_rotary_width(config)
    if not isinstance(config.get("dflash_config"), dict) and any(config.get(field) for field in NESTED):
        config = {**config, "dflash_config": {}}
    return _with_masks(_nested(config))


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the top-level fields `NESTED` and `ANCHOR_FIRST` moved into `dflash_config`, if any."""
    inner = config.get("dflash_config")
    if not isinstance(inner, dict):
        return config
    moved = {field: config[field] for field in (*NESTED, *ANCHOR_FIRST) if config.get(field) is not None}
    inner = moved | {field: value for field, value in inner.items() if value is not None}
    return {field: value for field, value in config.items() if field not in moved} | {"dflash_config": inner}


def _with_rotary_width(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a MiMo config with the number of rotated dimensions of a head as `rope_dim`. Return others unchanged.

    `rope_dim` follows from `partial_rotary_factor`. Other configs may have copied this factor from the target.
    """
    inner, factor = config.get("dflash_config"), config.get("partial_rotary_factor")
    is_mimo = isinstance(inner, dict) and MIMO in inner
    if not is_mimo or type(factor) not in (int, float) or type(config.get("head_dim")) is not int:
        return config
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if not isinstance(rope, dict):
        return config
    kept = {field: value for field, value in config.items() if field != "partial_rotary_factor"}
    return kept | {"rope_parameters": {"rope_dim": int(config["head_dim"] * factor), **rope}}


def _with_masks(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with attention masks in z-lab's fields.

    With ModelOpt's `use_swa`, sliding layers have the window `swa_window_size`. If `layer_types` names no sliding
    layer, or is missing, every layer becomes a sliding layer. These layers are non-causal by default.
    """
    inner = config.get("dflash_config")
    if not isinstance(inner, dict) or not inner.get("use_swa"):
        return config
    kinds = config.get("layer_types") or [FULL] * (config.get("num_hidden_layers") or 0)
    window = {"sliding_window": inner.get("swa_window_size") or config.get("sliding_window")}
    if SLIDING in kinds:
        return {**config, **window}
    inner = {"causal": False, **inner} if config.get("is_causal") is None else inner
    return {**config, **window, "layer_types": [SLIDING] * len(kinds), "dflash_config": inner}


def _of_speculators(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind, layers = config.get("speculators_model_type", "dflash"), config.get(LAYERS)
    if kind not in SPECULATORS_TYPES:
        raise NotSupported(
            f"{path}: speculators_model_type is {kind!r}, not {' or '.join(map(repr, SPECULATORS_TYPES))}; give a "
            "DFlash draft"
        )
    if not isinstance(layers, dict):
        raise ValueError(f"{path}: config.json has no {LAYERS}; save the draft with speculators again")
    n_vocab, n_drafted = layers.get("vocab_size"), config.get("draft_vocab_size")
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(id_) is int and id_ > 0 for id_ in ids):
        raise ValueError(
            f"{path}: aux_hidden_state_layer_ids is {ids!r}, not a list of layer numbers from 1 on; fix config.json"
        )
    both_ways = config.get("sliding_window_non_causal", kind == "dflash2")  # the trainer's defaults
    both_ways = both_ways and SLIDING in (layers.get("layer_types") or ())
    dtype = config.get("dtype") or config.get("torch_dtype") or layers.get("dtype") or layers.get("torch_dtype")
    given = {name: config[name] for name in (*ANCHOR_FIRST, "quantization_config") if name in config}
    second = {name: config[name] for name in SECOND if config.get(name) is not None}
    return {
        **layers,
        **given,
        # The layers are Qwen3's for any type of target, which `tensors.check_tensors` confirms by the norms of q, k.
        "model_type": "qwen3",
        **_rope_of_all(layers),
        **({"is_causal": False} if both_ways else {}),
        **({"dtype": dtype} if dtype else {}),
        "architectures": [SPECULATORS_TYPES[kind]],
        "block_size": config.get("block_size"),
        "dflash_config": {
            "mask_token_id": config.get("mask_token_id"),
            "target_layer_ids": [id_ - 1 for id_ in ids],  # z-lab counts from 0
            "embeds_scaled": False,
            **({} if n_drafted in (None, n_vocab) else {"draft_vocab_size": n_drafted}),
            **second,
        },
    }


def _rope_of_all(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope of sliding layers as the rope of all layers, if each kind of layer has its own rope; else {}.

    In training, all layers used the rope of sliding layers.
    """
    rope = layers.get("rope_parameters")
    nested = rope.get(SLIDING) if isinstance(rope, dict) else None
    return {"rope_parameters": nested} if isinstance(nested, dict) else {}


def _of_open_spec(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Convert a config with a `speculative_config`, which speculators writes since September 2026, to its older form.

    Raises:
        ValueError: a field is missing.
    """
    spec = config.get("speculative_config")
    if not isinstance(spec, dict) or type(spec.get("speculative_tokens")) is not int:
        raise ValueError(f"{path}: config.json has no speculative_config.speculative_tokens; save the draft again")
    ids, start = spec.get("target_layer_ids"), spec.get("target_layer_start_idx", 0)
    outer = ("architectures", "speculative_config", "open_spec_config_version", "speculators_metadata")
    return {
        LAYERS: {field: value for field, value in config.items() if field not in outer},
        "architectures": [SPECULATORS[0]],
        "speculators_model_type": spec.get("method", "dflash"),
        "aux_hidden_state_layer_ids": [id_ + 1 - start for id_ in ids] if isinstance(ids, list) else ids,
        "block_size": spec["speculative_tokens"] + (not spec.get("sample_from_anchor")),
        **{field: value for field, value in spec.items() if field in (*ANCHOR_FIRST, "mask_token_id")},
        **{field: spec.get(field) for field in ("draft_vocab_size", "sliding_window_non_causal") if field in spec},
    }


def _of_deepspec(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Convert DeepSpec's config. Its blocks are anchor-first unless one of the fields in `ANCHOR_FIRST` is false."""
    name = next(name for name in config["architectures"] if str(name).endswith(DEEPSPEC))
    inner = config.get("dflash_config")
    inner = inner if isinstance(inner, dict) else {}
    if rank := config.get("markov_rank") or inner.get("markov_rank"):
        raise NotSupported(
            f"{path}: {name} with markov_rank {rank} is DSpark; serve it with "
            "--speculative-algorithm DSPARK, or give a DFlash draft"
        )
    declared = any(fields.get(field) is False for fields in (config, inner) for field in ANCHOR_FIRST)
    first = {} if declared else {ANCHOR_FIRST[0]: True}
    return {**config, "architectures": [DFLASH], "dflash_config": {**inner, **first}}
