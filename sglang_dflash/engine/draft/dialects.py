"""Conversion of a draft's `config.json` from the dialects of other trainers to z-lab's, which `checkpoint.py` reads.

vLLM's trainer `speculators` nests the fields of the layers in an object, and counts target layers from 1. The trainer
DeepSpec writes fields at the top level, or nests some in `dflash_config`. Both trainers train DFlash's network, but
also other networks, which are rejected.
"""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.engine.draft import files
from sglang_dflash.engine.draft.record import SLIDING
from sglang_dflash.engine.draft.variants import ANCHOR_FIRST, ARCHITECTURES, DFLASH, GIVE
from sglang_dflash.errors import NotSupported

SPECULATORS, DEEPSPEC = "DFlashSpeculator", "DSparkModel"  # architecture name; suffix of names like Qwen3DSparkModel
LAYERS = "transformer_layer_config"  # object in which speculators nests the fields of the layers
WHOLE = "give a draft with the whole vocabulary (draft_vocab_size equal to vocab_size), or train one"


def names_draft(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json names an architecture of DFlash drafts, in any dialect."""
    names = config.get("architectures") or ()
    return (
        not (ARCHITECTURES.keys() | {SPECULATORS}).isdisjoint(names)
        or any(str(name).endswith(DEEPSPEC) for name in names)
        or config.get("speculators_model_type") == "dflash"
    )


def is_draft(path: str) -> bool:
    """Return whether the checkpoint's config names a DFlash draft; False if no config can be read."""
    try:
        config = files.read_config(path, None)
    except ValueError:
        return False
    return names_draft(config)


def in_our_words(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the config in z-lab's dialect. Only configs of speculators and DeepSpec need a conversion.

    Raises:
        NotSupported: the draft is not DFlash, has a reduced vocabulary, or is anchor-first (see `ANCHOR_FIRST`).
        ValueError: a field of speculators' dialect is missing or malformed.
    """
    names = config.get("architectures") or ()
    if LAYERS in config or "speculators_model_type" in config or SPECULATORS in names:
        return _of_speculators(config, path)
    if any(str(name).endswith(DEEPSPEC) for name in names):
        return _of_deepspec(config, path)
    return config


def _of_speculators(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind, layers = config.get("speculators_model_type", "dflash"), config.get(LAYERS)
    if kind != "dflash":
        raise NotSupported(f"{path}: speculators_model_type is {kind!r}, not 'dflash'; give a DFlash draft")
    if not isinstance(layers, dict):
        raise ValueError(f"{path}: config.json has no {LAYERS}; save the draft with speculators again")
    n_vocab, n_drafted = layers.get("vocab_size"), config.get("draft_vocab_size")
    if n_drafted not in (None, n_vocab):
        raise NotSupported(
            f"{path}: draft_vocab_size {n_drafted} is not vocab_size {n_vocab}: a reduced vocabulary is not "
            f"supported; {WHOLE}"
        )
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(id_) is int and id_ > 0 for id_ in ids):
        raise ValueError(
            f"{path}: aux_hidden_state_layer_ids is {ids!r}, not a list of layer numbers from 1 on; fix config.json"
        )
    both_ways = bool(config.get("sliding_window_non_causal")) and SLIDING in (layers.get("layer_types") or ())
    dtype = config.get("dtype") or config.get("torch_dtype") or layers.get("dtype") or layers.get("torch_dtype")
    given = {name: config[name] for name in (*ANCHOR_FIRST, "quantization_config") if name in config}
    return {
        **layers,
        **given,
        **({"is_causal": False} if both_ways else {}),
        **({"dtype": dtype} if dtype else {}),
        "architectures": [DFLASH],
        "block_size": config.get("block_size"),
        "dflash_config": {
            "mask_token_id": config.get("mask_token_id"),
            "target_layer_ids": [id_ - 1 for id_ in ids],  # z-lab counts from 0
        },
    }


def _of_deepspec(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Convert DeepSpec's config. Its blocks are anchor-first unless one of the fields in `ANCHOR_FIRST` is false."""
    name = next(name for name in config["architectures"] if str(name).endswith(DEEPSPEC))
    nested = config.get("dflash_config")  # published drafts nest some fields in it
    nested = {key: value for key, value in nested.items() if value is not None} if isinstance(nested, dict) else {}
    if rank := config.get("markov_rank") or nested.get("markov_rank"):
        raise NotSupported(
            f"{path}: {name} with markov_rank {rank} is DSpark; serve it with "
            "--speculative-algorithm DSPARK, or give a DFlash draft"
        )
    if not any(fields.get(field) is False for fields in (config, nested) for field in ANCHOR_FIRST):
        raise NotSupported(
            f"{path}: {name} is a DeepSpec draft, and its blocks are anchor-first (slot 0 predicts the next token), "
            f'which is not supported; if it was trained otherwise, write "{ANCHOR_FIRST[0]}": false into config.json, '
            f"else {GIVE}"
        )
    inner = ("mask_token_id", "target_layer_ids")
    return {
        **{field: value for field, value in config.items() if field not in inner},
        "architectures": [DFLASH],
        "dflash_config": nested | {field: nested.get(field, config.get(field)) for field in inner},
    }
