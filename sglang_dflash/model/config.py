"""What a DFlash checkpoint's config.json says, read once into one frozen, complete object.

Both spellings in use are read: `rope_theta` with `rope_scaling`, and `rope_parameters`; `block_size` at the top level
or inside `dflash_config`. A field that would change the arithmetic and is not implemented here is refused by name.

Knows nothing of weights, targets or engines.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Fields of later drafts and other families, with the values that leave DFlash v1 as it is.
NEUTRAL_TOP_LEVEL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_gemma_norm": (False,),
    "rope_is_neox_style": (True,),
    "is_neox_style": (True,),
    "partial_rotary_factor": (1, 1.0),
    "has_embed_tokens": (False,),
    "has_lm_head": (False,),
    "quantization_config": (),
}
NEUTRAL_DFLASH: dict[str, tuple[Any, ...]] = {
    "conv_kernel_size": (0,),
    "selector_rank": (0,),
    "projector_type": ("dflash",),
    "output_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A DFlash v1 draft. Sizes in elements, `sliding_window` in tokens including the query's own."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # features are the outputs of these target layers, in this order
    num_target_layers: int | None  # None: the checkpoint does not say
    layer_types: tuple[str, ...]
    sliding_window: int | None  # None: no sliding layer
    is_causal: bool | None  # None: sliding layers are causal inside the block, full layers are not
    rope_parameters: Json  # rope_type, rope_theta and what the type needs
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - {FULL, SLIDING}:
            raise ValueError(
                f"layer_types is {list(self.layer_types)}; give each of the {self.num_hidden_layers} draft layers "
                f"{FULL!r} or {SLIDING!r}"
            )
        if SLIDING in self.layer_types and not self.sliding_window:
            raise ValueError("layer_types names sliding_attention but sliding_window is not set; set it in config.json")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key/value heads "
                "evenly; num_key_value_heads must divide num_attention_heads"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} lies outside the vocabulary of {self.vocab_size} tokens"
            )
        if self.block_size < 1 or not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise ValueError(
                f"block_size is {self.block_size} and target_layer_ids {list(self.target_layer_ids)}; "
                "need a block of at least one token and at least one layer, counted from 0"
            )

    @property
    def feature_size(self) -> int:
        """C, the width of the features of one token."""
        return len(self.target_layer_ids) * self.hidden_size

    def layer_is_causal(self, layer: int) -> bool:
        """Whether a slot of the block sees only the slots before it in this layer."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def layer_window(self, layer: int) -> int | None:
        """How many tokens back this layer sees, the query's own included; None for all of them."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_json(cls, fields: Json) -> "DraftConfig":
        """Read the contents of a config.json. Raises ValueError naming the field that is missing or not supported."""
        dflash: Json = fields.get("dflash_config") or {}
        _refuse_unsupported(fields, NEUTRAL_TOP_LEVEL, "")
        _refuse_unsupported(dflash, NEUTRAL_DFLASH, "dflash_config.")
        n_layers, n_heads, hidden_size = (
            _required(fields, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        head_dim = fields.get("head_dim") or hidden_size // n_heads
        layer_types = tuple(fields.get("layer_types") or [FULL] * n_layers)
        return cls(
            hidden_size=hidden_size,
            num_hidden_layers=n_layers,
            num_attention_heads=n_heads,
            num_key_value_heads=fields.get("num_key_value_heads") or n_heads,
            head_dim=head_dim,
            intermediate_size=_required(fields, "intermediate_size"),
            vocab_size=_required(fields, "vocab_size"),
            block_size=_required({**fields, **dflash}, "block_size"),
            mask_token_id=_required(dflash, "mask_token_id", "dflash_config."),
            target_layer_ids=tuple(_required(dflash, "target_layer_ids", "dflash_config.")),
            num_target_layers=dflash.get("num_target_layers") or fields.get("num_target_layers"),
            layer_types=layer_types,
            sliding_window=fields.get("sliding_window") if SLIDING in layer_types else None,
            is_causal=fields.get("is_causal"),
            rope_parameters=_rope_parameters(fields, head_dim),
            rms_norm_eps=fields.get("rms_norm_eps", cls.rms_norm_eps),
            attention_bias=bool(fields.get("attention_bias", False)),
            max_position_embeddings=fields.get("max_position_embeddings", cls.max_position_embeddings),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "DraftConfig":
        """The config.json of a checkpoint's folder.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it contradicts itself, or asks for something that is not DFlash v1.
        """
        path = folder / "config.json"
        if not path.exists():
            raise FileNotFoundError(f"{folder} holds no config.json; give the folder of a DFlash checkpoint")
        try:
            return cls.from_json(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The config.json that SGLang, vLLM and `from_json` read."""
        theta = self.rope_parameters["rope_theta"]
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": dict(self.rope_parameters),
            # Transformers 4 lets this field, 10,000 unless it is given, win over rope_parameters.
            **({} if theta == 10_000 else {"rope_theta": theta}),
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            **({} if self.is_causal is None else {"is_causal": self.is_causal}),
            "tie_word_embeddings": False,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
        }


def _required(fields: Json, name: str, prefix: str = "") -> Any:
    value = fields.get(name)
    if value is None:
        raise ValueError(f"{prefix}{name} is missing; a DFlash checkpoint must name it")
    return value


def _refuse_unsupported(fields: Json, neutral: Mapping[str, tuple[Any, ...]], prefix: str) -> None:
    for name, values in neutral.items():
        value = fields.get(name)
        if value is not None and value not in values:
            raise ValueError(f"{prefix}{name} is {value!r}, which is not part of DFlash v1; use a DFlash v1 checkpoint")


def _rope_parameters(fields: Json, head_dim: int) -> dict[str, Any]:
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    rope.setdefault("rope_theta", fields.get("rope_theta", 10_000.0))
    if rope["rope_type"] not in ROPE_TYPES:
        raise ValueError(f"rope type {rope['rope_type']!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if rope.get("rope_dim", head_dim) != head_dim:
        raise ValueError(f"rope_dim is {rope['rope_dim']} and head_dim {head_dim}; the draft must rotate whole heads")
    # Copied from targets with partial or multi-axis rotation; a DFlash draft rotates whole heads by 1-D positions.
    for name in ("type", "rope_dim", "partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        rope.pop(name, None)
    return rope
