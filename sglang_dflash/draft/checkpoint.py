"""A draft checkpoint, read without loading it: `config.json` and the headers of its safetensors files.

`read` returns what the checkpoint says about itself, checked against itself: the fields are there, the tensors are
exactly those the fields imply, and nothing in it asks for a variant that DFlash v1 does not have. No code of a
checkpoint is run and no weight is read. It does not know the target, the flags or the engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang_dflash.draft import files as draft_files
from sglang_dflash.draft.variants import refuse_variants
from sglang_dflash.errors import STOCK, NotSupported

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Layer:
    """How one draft layer attends inside the block and back into the context.

    Attributes:
        window: tokens a query sees, itself included; None for the whole context.
        causal: a slot sees only earlier slots of its block; False: all of them.
    """

    window: int | None
    causal: bool


@dataclass(frozen=True)
class Checkpoint:
    """What a DFlash v1 checkpoint says. Sizes are counts of elements; nothing is divided by tensor parallelism."""

    path: str
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    n_target_layers: int | None  # of the target it was trained for, where it says so
    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    layers: tuple[Layer, ...]
    sliding_window: int | None
    rope: Mapping[str, Any]
    vocab_size: int | None  # a draft borrows the target's embedding and head, so it need not say
    dtype: str

    @property
    def window(self) -> int | None:
        """How far all layers look back; None if one of them sees the whole context."""
        return self.sliding_window if all(layer.window is not None for layer in self.layers) else None


def read(path: str, revision: str | None = None, overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read and check the draft at `path`: a directory, or a Hugging Face repository id.

    Args:
        revision: branch, tag or commit of a repository.
        overrides: `--json-model-override-args`, which SGLang applies to the draft as well.
    Raises:
        ValueError: the checkpoint contradicts itself or is incomplete.
        NotSupported: it is a valid draft of another kind.
    """
    config = draft_files.read_config(path, revision) | dict(overrides or {})
    checkpoint = parse(config, path)
    shapes = draft_files.tensor_shapes(path, revision)
    check_tensors(checkpoint, shapes, bias=bool(config.get("attention_bias", False)))
    return checkpoint


# -- config.json ---------------------------------------------------------------------------------------------------


def parse(config: Mapping[str, Any], path: str) -> Checkpoint:
    """The fields of `config`, typed and checked against each other.

    Args:
        path: what the config is called in messages.
    Raises:
        ValueError, NotSupported: see `read`.
    """
    refuse_variants(config, path)
    fields = Fields(config, path)
    layer_types = _layer_types(fields)
    n_layers = fields.count("num_hidden_layers")
    if len(layer_types) != n_layers:
        raise ValueError(f"{path}: layer_types has {len(layer_types)} entries for num_hidden_layers={n_layers}")
    window = fields.count("sliding_window") if "sliding_attention" in layer_types else None
    is_causal = config.get("is_causal", fields.dflash.get("causal"))
    n_heads, n_kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    if n_heads % n_kv_heads:
        raise ValueError(f"{path}: num_attention_heads={n_heads} is not a multiple of num_key_value_heads={n_kv_heads}")
    return Checkpoint(
        path=path,
        block_size=_block_size(fields),
        mask_token_id=fields.count("mask_token_id", least=0),
        target_layer_ids=_target_layer_ids(fields),
        n_target_layers=fields.count("num_target_layers") if fields.has("num_target_layers") else None,
        n_layers=n_layers,
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=fields.count("head_dim"),
        layer_types=layer_types,
        layers=tuple(_layer(kind, window, is_causal) for kind in layer_types),
        sliding_window=window,
        rope=_rope(fields),
        vocab_size=fields.count("vocab_size") if fields.has("vocab_size") else None,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
    )


class Fields:
    """Typed look-up in a draft config: `dflash_config` first, then the top level, as z-lab's configs have both.

    A field that is missing, or is not what is asked for, is a ValueError.
    """

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self.config = config
        self.dflash: Mapping[str, Any] = config.get("dflash_config") or {}
        self.path = path

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def get(self, name: str) -> Any:
        """What is there."""
        value = self._find(name)
        if value is None:
            raise ValueError(f"{self.path}: config.json has no {name}; the draft cannot be served without it, add it")
        return value

    def count(self, name: str, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{self.path}: {name} is {value!r}, not an integer of at least {least}; mend config.json")
        return value

    def _find(self, name: str) -> Any:
        return self.dflash[name] if name in self.dflash else self.config.get(name)


def _block_size(fields: Fields) -> int:
    return fields.count("block_size", least=2)  # the anchor and at least one draft


def _target_layer_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.dflash.get("target_layer_ids")
    if ids is None:
        raise ValueError(f"{fields.path}: config.json has no dflash_config.target_layer_ids; take it from the training")
    if not isinstance(ids, list) or not ids or not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise ValueError(f"{fields.path}: target_layer_ids is {ids!r}, not a list of layer numbers; mend config.json")
    if any(left >= right for left, right in pairwise(ids)):
        raise ValueError(f"{fields.path}: target_layer_ids {ids} do not increase; mend config.json")
    return tuple(ids)


def _layer_types(fields: Fields) -> tuple[str, ...]:
    kinds = fields.config.get("layer_types")
    if kinds is None:
        if fields.config.get("use_sliding_window"):
            raise ValueError(f"{fields.path}: use_sliding_window is set without layer_types; add layer_types")
        return ("full_attention",) * fields.count("num_hidden_layers")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise NotSupported(f"{fields.path}: layer_types has {unknown[0]!r}, which DFlash v1 does not know; {STOCK}")
    return tuple(kinds)


def _layer(kind: str, window: int | None, is_causal: bool | None) -> Layer:
    """Full layers see their whole block and sliding layers look back, unless `is_causal` is written out."""
    sliding = kind == "sliding_attention"
    return Layer(window if sliding else None, causal=sliding if is_causal is None else is_causal)


def _rope(fields: Fields) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before), as one mapping."""
    config = fields.config
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] not in ROPE_TYPES:
        raise NotSupported(
            f"{fields.path}: rope_type={rope['rope_type']!r} is not one of {', '.join(ROPE_TYPES)}; {STOCK}"
        )
    # A draft turns its whole heads by one position. Some configs carry the target's other ways along, unused, and
    # then say so with rope_dim; without it libraries disagree on what such a config means.
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0
    if (partial or "mrope_section" in rope) and rope.get("rope_dim") != fields.count("head_dim"):
        raise NotSupported(
            f"{fields.path}: partial_rotary_factor or mrope_section without rope_dim={fields.count('head_dim')}; "
            f"take them out of config.json if the draft was trained with plain rotary heads, or {STOCK}"
        )
    return rope


# -- tensors -------------------------------------------------------------------------------------------------------


def expected_shapes(checkpoint: Checkpoint, *, bias: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of a DFlash v1 draft and its shape."""
    hidden, inner = checkpoint.hidden_size, checkpoint.intermediate_size
    q, kv = checkpoint.n_heads * checkpoint.head_dim, checkpoint.n_kv_heads * checkpoint.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(checkpoint.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (checkpoint.head_dim,),
        "self_attn.k_norm.weight": (checkpoint.head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if bias:
        sizes = {"q": q, "k": kv, "v": kv, "o": hidden}
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    for i in range(checkpoint.n_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_tensors(checkpoint: Checkpoint, found: Mapping[str, tuple[int, ...]], *, bias: bool) -> None:
    """Compare the tensors found with those the config implies: none missing, none extra, every shape right.

    Args:
        found: shapes by name, as in the safetensors headers.
        bias: q, k, v and o projections have one.
    Raises:
        ValueError: a tensor is missing or has another shape.
        NotSupported: there is one that DFlash v1 does not have.
    """
    path, expected = checkpoint.path, expected_shapes(checkpoint, bias=bias)
    # A rotary table is derived from the config; some exporters save it all the same.
    present = {
        name.removeprefix("model."): shape for name, shape in found.items() if not name.endswith("rotary_emb.inv_freq")
    }
    missing, extra = sorted(set(expected) - set(present)), sorted(set(present) - set(expected))
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]}; "
            "the files do not belong to this config.json, fetch the draft again"
        )
    if extra:
        raise NotSupported(
            f"{path}: {len(extra)} tensors are not part of a DFlash v1 draft, the first is {extra[0]}; {STOCK}"
        )
    for name, shape in expected.items():
        if present[name] != shape:
            raise ValueError(
                f"{path}: {name} has shape {list(present[name])}, config.json implies {list(shape)}; "
                "the files do not belong to this config.json, fetch the draft again"
            )
