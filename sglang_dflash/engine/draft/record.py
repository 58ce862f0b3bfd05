"""Fields of a DFlash checkpoint as one record, independent of files, flags and SGLang."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sglang_dflash.engine.draft.packed import Packing
from sglang_dflash.engine.draft.variants import DFLASH, DFLASH_2, GIVE
from sglang_dflash.errors import NotSupported

FULL, SLIDING = "full_attention", "sliding_attention"
# Fields of `dflash_config` that DFlash 2 added, with the value that means "not used".
SECOND = {
    "conv_kernel_size": 0,
    "conv_group_size": 0,
    "selector_rank": 0,
    "selector_top_k": 0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Fields of a DFlash checkpoint, named as in its config.json.

    Sizes are for all ranks together. In a full layer a slot attends to the whole context and its whole block. In a
    sliding layer a slot attends to `sliding_window` tokens: itself and the tokens before it. If `sliding_is_causal` is
    False, it also attends to up to `sliding_window` - 1 tokens after it. The six fields from `conv_kernel_size` to
    `final_logit_softcapping` are DFlash 2's. A size of 0 means that the draft has no convolutions or no selector.

    Raises:
        ValueError: the fields contradict each other.
        NotSupported: a layer has an unknown kind.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int | None  # optional without a selector: the draft uses the target's embedding and head
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    rope_parameters: Mapping[str, Any]  # rope_type, rope_theta and the type's parameters
    layer_types: tuple[str, ...]
    sliding_window: int | None = None  # None: no sliding layer
    sliding_is_causal: bool = True
    num_target_layers: int | None  # number of layers of the draft's target; None: not given
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # target layers whose outputs are the features, in this order
    dtype: str = "bfloat16"
    conv_kernel_size: int = 0  # number of taps
    conv_group_size: int = 0  # channels per group; a group shares the kernel term computed from the hidden state
    selector_rank: int = 0  # width of a row of the selector's codebooks
    selector_top_k: int = 0  # number of candidates per slot
    output_multiplier: float = 1.0  # scales the candidates' logits
    final_logit_softcapping: float | None = None  # tanh soft cap applied after scaling; None: no cap
    packing: Packing | None = field(default=None, compare=False)  # format of quantized weights; None: not quantized
    # Shapes of the unused tensors in the draft's files (see `files.BORROWED`), by name.
    borrowed: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    path: str = field(default="the draft", compare=False)  # the draft's name in messages

    def __post_init__(self) -> None:
        path, window = self.path, self.sliding_window
        if len(self.layer_types) != self.num_hidden_layers:
            n_layers, n_types = self.num_hidden_layers, len(self.layer_types)
            raise ValueError(
                f"{path}: layer_types has {n_types} entries for num_hidden_layers={n_layers}; give every layer one"
            )
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            raise NotSupported(f"{path}: layer_types has {unknown[0]!r}, which DFlash does not have; {GIVE}")
        if (window is not None or SLIDING in self.layer_types) and (window or 0) < self.block_size:
            raise ValueError(
                f"{path}: sliding_window {window} is smaller than block_size {self.block_size}; fix config.json"
            )
        n_heads, n_kv_heads = self.num_attention_heads, self.num_key_value_heads
        if n_heads % n_kv_heads:
            raise ValueError(
                f"{path}: num_attention_heads={n_heads} is not a multiple of num_key_value_heads={n_kv_heads}; "
                "fix config.json"
            )
        if self.block_size < 2:
            raise ValueError(
                f"{path}: block_size {self.block_size} leaves no slot for a draft after the anchor; give 2 or more"
            )
        ids = self.target_layer_ids
        if not ids or any(left >= right for left, right in pairwise((-1, *ids))):
            raise ValueError(
                f"{path}: target_layer_ids {list(ids)} do not increase; fix config.json, or give another draft"
            )
        self._check_second()

    def _check_second(self) -> None:
        """Check the fields of DFlash 2."""
        for one, other in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            if bool(vars(self)[one]) != bool(vars(self)[other]):
                raise ValueError(
                    f"{self.path}: config.json sets only one of {one} and {other}; set both as the draft was trained"
                )
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"{self.path}: conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}; "
                "fix config.json"
            )
        if self.selector_top_k and self.vocab_size is None:
            raise ValueError(f"{self.path}: config.json has selector_top_k, but no vocab_size; add vocab_size")
        if self.selector_top_k > (self.vocab_size or 0):
            raise ValueError(
                f"{self.path}: selector_top_k {self.selector_top_k} exceeds vocab_size {self.vocab_size}; "
                "fix config.json"
            )

    @property
    def feature_size(self) -> int:
        """Return C, the width of the features of one token."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Return each layer's window in tokens, including the slot itself; None for a full layer."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def window(self) -> int | None:
        """Return the window of the draft in tokens; None if a layer attends to the whole context."""
        return None if FULL in self.layer_types else self.sliding_window

    def to_json(self) -> dict[str, Any]:
        """Return the content of a config.json, for plain weights, that SGLang, vLLM and `parse` can read."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        dflash = {name: fields.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        second = {name: fields.pop(name) for name in SECOND}
        causal = fields.pop("sliding_is_causal")
        del fields["borrowed"], fields["packing"]
        theta = self.rope_parameters["rope_theta"]
        return {
            "architectures": [DFLASH_2 if self.selector_rank else DFLASH],
            "model_type": "qwen3",
            "hidden_act": "silu",
            **{name: value for name, value in fields.items() if name != "path" and value is not None},
            # In Transformers 4 rope_theta, whose default is 10,000, overrides rope_parameters.
            **({} if theta == 10_000 else {"rope_theta": theta}),
            "use_sliding_window": self.sliding_window is not None,
            **({} if causal else {"is_causal": False}),
            "tie_word_embeddings": False,
            "dflash_config": {
                "block_size": self.block_size,
                **dflash,
                **{name: value for name, value in second.items() if value != SECOND[name]},
            },
        }
