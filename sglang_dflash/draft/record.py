"""What a DFlash checkpoint says, as one record. Plain data: it knows no files, no flags and no engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sglang_dflash.draft.variants import DFLASH, DFLASH_2
from sglang_dflash.errors import STOCK, NotSupported

FULL, SLIDING = "full_attention", "sliding_attention"
# Fields of `dflash_config` that DFlash 2 brought, with what stands for "none".
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
    """The fields of a DFlash checkpoint, by their names in its config.json.

    Sizes are counts of elements; nothing is divided by tensor parallelism. In a full layer a slot sees its whole block;
    in a sliding one it sees `sliding_window` tokens, itself and those before it, and without `sliding_is_causal` as
    many after it. The six from `conv_kernel_size` on are DFlash 2's, 0 where a draft has no convolution or no selector.

    Raises:
        ValueError: the fields contradict each other.
        NotSupported: a layer is of a kind that DFlash does not have.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int | None  # a draft borrows the target's embedding and head, so one without a selector need not say
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    rope_parameters: Mapping[str, Any]  # rope_type, rope_theta and what the type needs
    layer_types: tuple[str, ...]
    sliding_window: int | None = None  # None: no sliding layer
    sliding_is_causal: bool = True
    num_target_layers: int | None  # of the target it was trained for, where it says so
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # features are the outputs of these target layers, in this order
    dtype: str = "bfloat16"
    conv_kernel_size: int = 0  # taps
    conv_group_size: int = 0  # channels that share what a token changes of the taps
    selector_rank: int = 0
    selector_top_k: int = 0  # candidates per slot
    output_multiplier: float = 1.0  # of the candidates' logits,
    final_logit_softcapping: float | None = None  # and then their soft cap
    # Shapes of the tensors in its files that are the target's, by name: a draft uses the target's own.
    borrowed: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
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
            raise NotSupported(f"{path}: layer_types has {unknown[0]!r}, which DFlash does not know; {STOCK}")
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
                f"{path}: a block of {self.block_size} has no draft behind its anchor; give block_size 2 or more"
            )
        ids = self.target_layer_ids
        if not ids or any(left >= right for left, right in pairwise((-1, *ids))):
            raise ValueError(f"{path}: target_layer_ids {list(ids)} do not increase; fix config.json")
        self._check_second()

    def _check_second(self) -> None:
        """The fields of DFlash 2."""
        for one, other in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            if bool(vars(self)[one]) != bool(vars(self)[other]):
                raise ValueError(f"{self.path}: {one} and {other} go together; fix config.json")
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"{self.path}: conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}; "
                "fix config.json"
            )
        if self.selector_top_k > (self.vocab_size or 0):
            raise ValueError(
                f"{self.path}: selector_top_k {self.selector_top_k} of a vocab_size of {self.vocab_size}; "
                "fix config.json"
            )

    @property
    def feature_size(self) -> int:
        """Return C, the width of the features of one token."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Return how many tokens each layer sees, a slot's own included; None for the whole context and block."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def window(self) -> int | None:
        """Return how many tokens all layers look back; None if one of them sees the whole context."""
        return None if FULL in self.layer_types else self.sliding_window

    def to_json(self) -> dict[str, Any]:
        """Return the config.json that SGLang, vLLM and `parse` read."""
        said = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        dflash = {name: said.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        second = {name: said.pop(name) for name in SECOND}
        causal = said.pop("sliding_is_causal")
        del said["borrowed"]
        theta = self.rope_parameters["rope_theta"]
        return {
            "architectures": [DFLASH_2 if self.selector_rank else DFLASH],
            "model_type": "qwen3",
            "hidden_act": "silu",
            **{name: value for name, value in said.items() if name != "path" and value is not None},
            # Transformers 4 lets this field, 10,000 unless it is given, win over rope_parameters.
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
