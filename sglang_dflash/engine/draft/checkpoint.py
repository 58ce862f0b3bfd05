"""Reader of a draft checkpoint without its weights: `config.json` and the headers of its safetensors files.

The server, the PyTorch reference, the trainer and the MLX model read drafts with this module. It checks that fields are
present and agree with each other, and that the config is not another drafter's. The files must contain exactly the
tensors that the fields imply, apart from unused ones (`files.BORROWED`). `read` accepts configs that
`Checkpoint.to_json` writes. No code of a checkpoint is executed. This module uses neither flags nor SGLang.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_dflash.engine.draft import files as draft_files
from sglang_dflash.engine.draft import lilicorr_fields, packed
from sglang_dflash.engine.draft.dialects import LAYERS, in_our_words
from sglang_dflash.engine.draft.fields import Fields
from sglang_dflash.engine.draft.mask_row import read_row, with_mask_file
from sglang_dflash.engine.draft.record import FULL, SECOND, SLIDING, Checkpoint
from sglang_dflash.engine.draft.tensors import apart_shapes, check_tensors, expected_shapes
from sglang_dflash.engine.draft.variants import ANCHOR_FIRST, ARCHITECTURES, DFLASH_2, GIVE, LAGUNA, refuse_variants
from sglang_dflash.errors import STOCK, NotSupported

GATINGS = {True: "per-head", "per-head": "per-head", "per-element": "per-element", False: "", "disabled": ""}
DTYPES = ("bfloat16", "float16", "float32", "float64")
# For each rope type, the numbers that it requires.
ROPE_TYPES = {
    "default": (),
    "linear": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
# Rope fields that a draft's config may copy from its target, if the target rotates only a part of each head or uses
# multi-modal positions. The draft rotates heads by one position. Of these fields it uses only `rope_dim`, the number of
# rotated dimensions of a head, which defaults to the head width.
COPIED_FROM_TARGET = ("rope_dim", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def read(path: str, revision: str | None = None) -> Checkpoint:
    """Read and check the draft at `path`: a directory, or a Hugging Face repository id.

    Args:
        revision: branch, tag or commit of a repository.
    Raises:
        ValueError: the checkpoint cannot be read, is incomplete, or contradicts itself.
        NotSupported: the checkpoint is a valid draft, but not a DFlash draft, or has an unsupported field.
    """
    checkpoint = parse(completed(draft_files.read_config(path, revision), path, revision), path)
    stored = packed.plain_shapes(draft_files.tensor_headers(path, revision), checkpoint.packing, path)
    found = apart_shapes(checkpoint, stored)
    unused = set(draft_files.BORROWED) - expected_shapes(checkpoint).keys()
    borrowed = {name: found.pop(name) for name in unused & found.keys()}
    check_tensors(checkpoint, found)
    if checkpoint.mask_file:
        with suppress(ModuleNotFoundError):  # there may be no torch with MLX, which rejects drafts with such a file
            read_row(checkpoint, Path(checkpoint.mask_file))
    return replace(checkpoint, borrowed=borrowed)


def completed(config: dict[str, Any], path: str, revision: str | None) -> dict[str, Any]:
    """Return a config with facts from other files of the draft.

    These are the format of quantized weights in ModelOpt's hf_quant_config.json, and the path of mask_embedding.pt.

    Raises:
        ValueError: see `packed.with_modelopt_config`.
    """
    return with_mask_file(packed.with_modelopt_config(config, path, revision), path, revision)


def parse(config: Mapping[str, Any], path: str) -> Checkpoint:
    """Return the fields of `config`, typed and checked against each other.

    Args:
        path: the draft's name in messages.
    Raises:
        ValueError: a field is missing or wrong, or fields contradict each other.
        NotSupported: the config is not a DFlash draft's, or has an unsupported field.
    """
    home = LAYERS if LAYERS in config else ""
    config = in_our_words(config, path)
    refuse_variants(config, path)
    fields, of_layers = (Fields(config, path, "dflash_config", home=where) for where in ("", home))
    n_layers, head_dim = of_layers.count("num_hidden_layers"), of_layers.count("head_dim")
    layer_types = _layer_types(config, n_layers, path)
    full_is_causal, sliding_is_causal = _causality(config, layer_types, path)
    return Checkpoint(
        path=path,
        architecture=config["architectures"][0],
        hidden_size=of_layers.count("hidden_size"),
        num_hidden_layers=n_layers,
        num_attention_heads=of_layers.count("num_attention_heads"),
        num_key_value_heads=of_layers.count("num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=of_layers.count("intermediate_size"),
        vocab_size=fields.optional_count("vocab_size"),
        rms_norm_eps=float(fields.number("rms_norm_eps", Checkpoint.rms_norm_eps)),
        attention_bias=bool(fields.get("attention_bias", False)),
        max_position_embeddings=fields.count("max_position_embeddings", Checkpoint.max_position_embeddings),
        rope_parameters=_rope_parameters(config, head_dim, path),
        layer_types=layer_types,
        sliding_window=of_layers.count("sliding_window") if SLIDING in layer_types else None,
        full_is_causal=full_is_causal,
        sliding_is_causal=sliding_is_causal,
        num_target_layers=fields.optional_count("num_target_layers"),
        # A block has the anchor and at least one draft. Nemotron's config has no size, and SGLang then assumes 16.
        block_size=fields.count("block_size", 16 if config.get("has_embed_tokens") else None, least=2),
        mask_token_id=fields.count("mask_token_id", least=0),
        target_layer_ids=_target_layer_ids(config, path),
        dtype=_dtype(config, path),
        packing=packed.packing_of(config, path),
        **_second(config, path),
        **_kind(config, fields, path),
    )


def _kind(config: Mapping[str, Any], fields: Fields, path: str) -> dict[str, Any]:
    """Return the fields by which drafts of other trainers differ from z-lab's."""
    inner, is_laguna = config["dflash_config"], LAGUNA in config["architectures"]
    n_drafted = fields.optional_count("draft_vocab_size")
    return {
        "norms_features": is_laguna,
        "has_embed_tokens": bool(config.get("has_embed_tokens")),
        "embeds_scaled": bool(inner.get("embeds_scaled", True)),
        "sample_from_anchor": any(inner.get(field) for field in ANCHOR_FIRST),
        "use_gemma_norm": bool(config.get("use_gemma_norm")),
        "rope_is_neox_style": bool(config.get("rope_is_neox_style", config.get("is_neox_style", True))),
        **_activation(config, fields, path),
        "shift_label": bool(inner.get("shift_label", False)),
        "gru_hidden_dim": fields.count("gru_hidden_dim", 0, least=0),
        "emb_dim": fields.count("emb_dim", 0, least=0),
        "lilicorr": lilicorr_fields.sizes_of(config, path),
        "has_mask_embedding": bool(config.get("has_mask_embedding")),
        "mask_file": config.get("mask_file", ""),
        "attention_sink_bias": bool(inner.get("attention_sink_bias", False)),
        "attention_value_scale": float(fields.number("attention_value_scale", 1.0)),
        "gating": _gating(config.get("gating", is_laguna), path),
        "draft_vocab_size": None if n_drafted == fields.get("vocab_size") else n_drafted,
    }


def _activation(config: Mapping[str, Any], fields: Fields, path: str) -> dict[str, Any]:
    """Return the fields of the MLP's activation."""
    name = config.get("hidden_act") or "silu"
    if name not in ("silu", "swigluoai"):
        raise NotSupported(f"{path}: hidden_act={name!r} is not DFlash (which has 'silu' or 'swigluoai'); {GIVE}")
    numbers = ("swiglu_alpha", "swiglu_limit") if name == "swigluoai" else ()
    return {"hidden_act": name} | {number: float(fields.number(number)) for number in numbers}


def _gating(value: Any, path: str) -> str:
    if value is not None and value not in GATINGS:
        raise NotSupported(f"{path}: gating is {value!r}, not one of {', '.join(map(repr, GATINGS))}; {GIVE}")
    return GATINGS.get(value, "")


def _second(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the fields that DFlash 2 added. A selector and DFlash 2's architecture must occur together."""
    given = Fields(config["dflash_config"], path, "")
    sizes = {name: given.count(name, 0, least=0) for name in SECOND if name.startswith(("conv_", "selector_"))}
    architecture, rank = config["architectures"][0], sizes["selector_rank"]
    is_second = ARCHITECTURES[architecture] == DFLASH_2
    if is_second and not rank:
        raise ValueError(
            f"{path}: {architecture} is DFlash 2, but selector_rank is 0 or missing; write the trained selector_rank "
            "into dflash_config"
        )
    if rank and not is_second:
        raise ValueError(
            f"{path}: selector_rank is {rank}, but {architecture} has no candidate selector; correct architectures or "
            "selector_rank in config.json"
        )
    return sizes | {
        "output_multiplier": given.number("output_multiplier", 1.0),
        "final_logit_softcapping": given.get("final_logit_softcapping") or None,
    }


def _dtype(config: Mapping[str, Any], path: str) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or Checkpoint.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{path}: dtype is {name!r}, not one of {', '.join(DTYPES)}; fix config.json")
    return name


def _target_layer_ids(config: Mapping[str, Any], path: str) -> tuple[int, ...]:
    ids = config["dflash_config"].get("target_layer_ids")
    if ids is None:
        raise ValueError(
            f"{path}: config.json has no dflash_config.target_layer_ids; add the list that the draft was trained "
            "with (in DeepSpec's layout, to target_layer_ids at the top level)"
        )
    if not isinstance(ids, list) or not ids or not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise ValueError(f"{path}: target_layer_ids is {ids!r}, not a list of layer numbers from 0 on; fix config.json")
    return tuple(ids)


def _layer_types(config: Mapping[str, Any], n_layers: int, path: str) -> tuple[str, ...]:
    """Return the kind of each layer."""
    given = config.get("layer_types")
    if given is None and config.get("use_sliding_window"):
        raise ValueError(f"{path}: use_sliding_window is set without layer_types; add layer_types")
    return (FULL,) * n_layers if given is None else tuple(given)


def _causality(config: Mapping[str, Any], kinds: tuple[str, ...], path: str) -> tuple[bool, bool]:
    """Return whether full layers are causal, and whether sliding layers are causal.

    In a causal layer a slot attends to no later slot of its block. By default only sliding layers are causal. Trainers
    have three fields that make all layers causal or non-causal.
    """
    inner = config["dflash_config"]
    given = {"is_causal": config.get("is_causal"), "dflash_config.causal": inner.get("causal")}
    given["dflash_config.causal_head"] = inner.get("causal_head") or None
    given = {name: bool(value) for name, value in given.items() if value is not None}
    if len(set(given.values())) > 1:
        fields = " and ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"{path}: {fields} contradict each other; keep the one with which the draft was trained")
    causal = next(iter(given.values()), None)
    return bool(causal) and FULL in kinds, causal is not False or SLIDING not in kinds


def _rope_parameters(config: Mapping[str, Any], head_dim: int, path: str) -> dict[str, Any]:
    """Return the rope fields as one mapping, without those in `COPIED_FROM_TARGET`.

    `rope_dim` is returned if it is smaller than the head width.
    Transformers 5 writes `rope_parameters`, earlier versions write `rope_theta` and `rope_scaling`.
    """
    rope = _given_rope(config, path)
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if rope["rope_type"] not in ROPE_TYPES:
        raise NotSupported(f"{path}: rope_type={rope['rope_type']!r} is not one of {', '.join(ROPE_TYPES)}; {STOCK}")
    fields = Fields(rope, f"{path}: rope_parameters", "")
    for name in ("rope_theta", *ROPE_TYPES[rope["rope_type"]]):
        fields.number(name)
    width = rope.get("rope_dim") or head_dim
    if type(width) is not int or width % 2 or not 0 < width <= head_dim:
        raise ValueError(
            f"{path}: rope_dim is {width!r}, not an even number up to the head width {head_dim}; fix config.json"
        )
    # If rope_dim is missing, some libraries apply the target's partial_rotary_factor and mrope_section to the draft.
    # Others do not. So the draft's own rotation is unknown.
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0
    if (partial or "mrope_section" in rope) and rope.get("rope_dim") is None:
        field = "rope_parameters" if config.get("rope_parameters") or not config.get("rope_scaling") else "rope_scaling"
        raise NotSupported(
            f"{path}: config.json has partial_rotary_factor or mrope_section, but no rope_dim. So it is unclear how "
            f"the draft rotates its heads; add rope_dim={head_dim} to {field} if it rotates whole heads, or {STOCK}"
        )
    if rope["rope_type"] == "linear":
        rope["factor"] = float(fields.number("factor", 1.0))  # SGLang accepts a float or a list, but no int
    own = {name: value for name, value in rope.items() if name not in COPIED_FROM_TARGET}
    if width == head_dim:
        return own
    if rope["rope_type"] != "default" or not config.get("rope_is_neox_style", config.get("is_neox_style", True)):
        raise NotSupported(f"{path}: rope_dim={width} with a scaled rope, or with is_neox_style=false; {STOCK}")
    return own | {"rope_dim": width}


def _given_rope(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return `rope_parameters` or `rope_scaling`, with `rope_type`. Both may be given if they agree."""
    ropes = []
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"{path}: {field} is {rope!r}, not an object; fix config.json")
        if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
            raise NotSupported(
                f"{path}: {field} has a rope for each kind of layer ({', '.join(nested)}), and the layers of a DFlash "
                f"draft share one; if they are equal, write the fields directly into {field}, else {GIVE}"
            )
        if rope:
            ropes.append({"rope_type": rope.get("type", "default"), **rope})
            ropes[-1].pop("type", None)
    used = ropes[-1].keys() - COPIED_FROM_TARGET if ropes else ()
    if any(ropes[0].get(name) != ropes[-1][name] for name in used):
        raise ValueError(
            f"{path}: rope_scaling {ropes[-1]} contradicts rope_parameters {ropes[0]}; remove the one with which the "
            "draft was not trained"
        )
    return dict(ropes[0]) if ropes else {"rope_type": "default"}
