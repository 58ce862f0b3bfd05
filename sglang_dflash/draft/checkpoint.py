"""A draft checkpoint, read without loading it: `config.json` and the headers of its safetensors files.

The one reader of a draft: the server, plain torch and the trainer ask it what a checkpoint says. The fields are there,
they agree with each other, the tensors are exactly those the fields imply, and nothing asks for a variant that DFlash
v1 does not have. What `to_json` writes, `read` accepts. No code of a checkpoint is run and no weight is read. It does
not know the flags or the engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sglang_dflash.draft import files as draft_files
from sglang_dflash.draft.fields import Fields
from sglang_dflash.draft.variants import ARCHITECTURE, refuse_variants
from sglang_dflash.errors import STOCK, NotSupported

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# A draft turns its whole heads by one position. Drafts of partly rotated or multi-modal targets carry the target's
# fields along, unused, and say so with `rope_dim`.
COPIED_FROM_TARGET = ("rope_dim", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a DFlash v1 checkpoint says, under the names of its config.json.

    Sizes are counts of elements; nothing is divided by tensor parallelism. In a full layer a slot sees its whole block;
    in a sliding one it sees `sliding_window` tokens, itself and those before it.

    Raises:
        ValueError: the fields contradict each other.
        NotSupported: a layer is of a kind that DFlash v1 does not have.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int | None  # a draft borrows the target's embedding and head, so it need not say
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    rope_parameters: Mapping[str, Any]  # rope_type, rope_theta and what the type needs
    layer_types: tuple[str, ...]
    sliding_window: int | None = None  # None: no sliding layer
    num_target_layers: int | None  # of the target it was trained for, where it says so
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # features are the outputs of these target layers, in this order
    dtype: str = "bfloat16"
    path: str = field(default="the draft", compare=False)  # what it is called in messages

    def __post_init__(self) -> None:
        path, window = self.path, self.sliding_window
        if len(self.layer_types) != self.num_hidden_layers:
            n_layers, n_types = self.num_hidden_layers, len(self.layer_types)
            raise ValueError(
                f"{path}: layer_types has {n_types} entries for num_hidden_layers={n_layers}; give every layer one"
            )
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            raise NotSupported(f"{path}: layer_types has {unknown[0]!r}, which DFlash v1 does not know; {STOCK}")
        if (window is not None or SLIDING in self.layer_types) and (window or 0) < self.block_size:
            raise ValueError(
                f"{path}: sliding_window {window} is smaller than block_size {self.block_size}; mend config.json"
            )
        n_heads, n_kv_heads = self.num_attention_heads, self.num_key_value_heads
        if n_heads % n_kv_heads:
            raise ValueError(
                f"{path}: num_attention_heads={n_heads} is not a multiple of num_key_value_heads={n_kv_heads}; "
                "mend config.json"
            )
        if self.block_size < 2:
            raise ValueError(
                f"{path}: a block of {self.block_size} has no draft behind its anchor; give block_size 2 or more"
            )
        ids = self.target_layer_ids
        if not ids or any(left >= right for left, right in pairwise((-1, *ids))):
            raise ValueError(f"{path}: target_layer_ids {list(ids)} do not increase; mend config.json")

    @property
    def feature_size(self) -> int:
        """C, the width of the features of one token."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many tokens each layer sees, a slot's own included; None for the whole context and block."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def window(self) -> int | None:
        """How far all layers look back; None if one of them sees the whole context."""
        return None if FULL in self.layer_types else self.sliding_window

    def to_json(self) -> dict[str, Any]:
        """The config.json that SGLang, vLLM and `parse` read."""
        said = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        dflash = {name: said.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        theta = self.rope_parameters["rope_theta"]
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_act": "silu",
            **{name: value for name, value in said.items() if name != "path" and value is not None},
            # Transformers 4 lets this field, 10,000 unless it is given, win over rope_parameters.
            **({} if theta == 10_000 else {"rope_theta": theta}),
            "use_sliding_window": self.sliding_window is not None,
            "tie_word_embeddings": False,
            "dflash_config": {"block_size": self.block_size, **dflash},
        }


def read(path: str, revision: str | None = None, overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read and check the draft at `path`: a directory, or a Hugging Face repository id.

    Args:
        revision: branch, tag or commit of a repository.
        overrides: `--json-model-override-args`, which SGLang applies to the draft as well.
    Raises:
        ValueError: the checkpoint contradicts itself or is incomplete.
        NotSupported: it is a valid draft of another kind.
    """
    checkpoint = parse(draft_files.read_config(path, revision) | dict(overrides or {}), path)
    check_tensors(checkpoint, draft_files.tensor_shapes(path, revision))
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
    fields = Fields(config, path, "dflash_config")
    n_layers, head_dim = fields.count("num_hidden_layers"), fields.count("head_dim")
    layer_types = _layer_types(config, n_layers, path)
    return Checkpoint(
        path=path,
        hidden_size=fields.count("hidden_size"),
        num_hidden_layers=n_layers,
        num_attention_heads=fields.count("num_attention_heads"),
        num_key_value_heads=fields.count("num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=fields.count("intermediate_size"),
        vocab_size=fields.count_if_said("vocab_size"),
        rms_norm_eps=fields.get("rms_norm_eps", Checkpoint.rms_norm_eps),
        attention_bias=bool(fields.get("attention_bias", False)),
        max_position_embeddings=fields.count("max_position_embeddings", Checkpoint.max_position_embeddings),
        rope_parameters=_rope_parameters(config, head_dim, path),
        layer_types=layer_types,
        sliding_window=fields.count("sliding_window") if SLIDING in layer_types else None,
        num_target_layers=fields.count_if_said("num_target_layers"),
        block_size=fields.count("block_size", least=2),  # the anchor and at least one draft
        mask_token_id=fields.count("mask_token_id", least=0),
        target_layer_ids=_target_layer_ids(config, path),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or Checkpoint.dtype),
    )


def _target_layer_ids(config: Mapping[str, Any], path: str) -> tuple[int, ...]:
    ids = config["dflash_config"].get("target_layer_ids")
    if ids is None:
        raise ValueError(f"{path}: config.json has no dflash_config.target_layer_ids; take it from the training")
    if not isinstance(ids, list) or not ids or not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise ValueError(f"{path}: target_layer_ids is {ids!r}, not a list of layer numbers; mend config.json")
    return tuple(ids)


def _layer_types(config: Mapping[str, Any], n_layers: int, path: str) -> tuple[str, ...]:
    """A kind says how its layers mask a block; a field that says otherwise is another drafter's."""
    if config.get("layer_types") is None and config.get("use_sliding_window"):
        raise ValueError(f"{path}: use_sliding_window is set without layer_types; add layer_types")
    kinds = tuple(config.get("layer_types", (FULL,) * n_layers))
    said = {"is_causal": config.get("is_causal"), "dflash_config.causal": config["dflash_config"].get("causal")}
    for name, causal in said.items():
        other = [kind for kind in kinds if causal not in (None, kind == SLIDING)]
        if other:
            raise NotSupported(
                f"{path}: {name}={causal} on {other[0]} layers is not DFlash v1 "
                f"(full layers see their block, sliding layers look back); {STOCK}"
            )
    return kinds


def _rope_parameters(config: Mapping[str, Any], head_dim: int, path: str) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before), as one mapping."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] not in ROPE_TYPES:
        raise NotSupported(f"{path}: rope_type={rope['rope_type']!r} is not one of {', '.join(ROPE_TYPES)}; {STOCK}")
    if rope.get("rope_dim") not in (None, head_dim):
        raise NotSupported(f"{path}: rope_dim={rope['rope_dim']} turns a part of heads of {head_dim}; {STOCK}")
    # Without rope_dim libraries disagree on what the target's fields mean here.
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0
    if (partial or "mrope_section" in rope) and rope.get("rope_dim") is None:
        raise NotSupported(
            f"{path}: partial_rotary_factor or mrope_section without rope_dim={head_dim}; "
            f"take them out of config.json if the draft was trained with plain rotary heads, or {STOCK}"
        )
    return {name: value for name, value in rope.items() if name not in COPIED_FROM_TARGET}


# -- tensors -------------------------------------------------------------------------------------------------------


def expected_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Every tensor of a DFlash v1 draft and its shape."""
    hidden, inner, head_dim = checkpoint.hidden_size, checkpoint.intermediate_size, checkpoint.head_dim
    q, kv = checkpoint.num_attention_heads * head_dim, checkpoint.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, checkpoint.feature_size),
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
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if checkpoint.attention_bias:
        sizes = {"q": q, "k": kv, "v": kv, "o": hidden}
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    for i in range(checkpoint.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_tensors(checkpoint: Checkpoint, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the tensors found with those the config implies: none missing, none extra, every shape right.

    Args:
        found: shapes by name, see `files.tensor_shapes`.
    Raises:
        ValueError: a tensor is missing or has another shape.
        NotSupported: there is one that DFlash v1 does not have.
    """
    path, expected = checkpoint.path, expected_shapes(checkpoint)
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
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
        if found[name] != shape:
            raise ValueError(
                f"{path}: {name} has shape {list(found[name])}, config.json implies {list(shape)}; "
                "the files do not belong to this config.json, fetch the draft again"
            )
