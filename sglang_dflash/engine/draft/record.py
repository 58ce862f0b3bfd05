"""Fields of a DFlash checkpoint as one record, independent of files, flags and SGLang."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from sglang_dflash.engine.draft.lilicorr_fields import PREFIX, LiLiCorrSizes
from sglang_dflash.engine.draft.packed import Packing
from sglang_dflash.engine.draft.variants import DFLASH, DFLASH_2, GIVE
from sglang_dflash.errors import NotSupported

CANDIDATES = 64  # tokens per slot whose corrections Domino's rollout computes
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
# Further top-level fields of config.json that few drafts have.
RARE = (
    "has_embed_tokens", "has_mask_embedding", "use_gemma_norm", "rope_is_neox_style", "hidden_act", "swiglu_alpha",
    "swiglu_limit",
)  # fmt: skip
# Fields of `dflash_config` that not every draft has, with the value that means "not used".
ADDED = SECOND | {
    "sample_from_anchor": False,
    "embeds_scaled": True,
    "draft_vocab_size": None,
    "shift_label": False,
    "gru_hidden_dim": 0,
    "emb_dim": 0,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Fields of a DFlash checkpoint, named as in its config.json.

    Sizes are for all ranks together. In a full layer a slot attends to the whole context and its whole block. In a
    sliding layer a slot attends to `sliding_window` tokens: itself and the tokens before it. If `sliding_is_causal` is
    False, it also attends to up to `sliding_window` - 1 tokens after it. The six fields from `conv_kernel_size` to
    `final_logit_softcapping` are DFlash 2's. A size of 0 means that the draft has no convolutions or no selector.

    The last fields describe kinds of drafts that other trainers publish; their defaults are z-lab's DFlash.

    Raises:
        ValueError: the fields contradict each other.
        NotSupported: a layer has an unknown kind.
    """

    architecture: str = DFLASH  # decides which layers of a Muse Glimmer target SGLang captures
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
    conv_group_size: int = 0  # channels per group; a group shares its `change` (`kernels/block_conv.py`)
    selector_rank: int = 0  # width of a row of the selector's codebooks
    selector_top_k: int = 0  # number of candidates per slot
    output_multiplier: float = 1.0  # scales the candidates' logits
    final_logit_softcapping: float | None = None  # tanh soft cap applied after scaling; None: no cap
    # Forms of the files that are converted while they load. With `use_gemma_norm`, norms store their weight less 1.
    # Without `rope_is_neox_style`, rope rotates the pairs (2 i, 2 i + 1) of a head, not (i, i + E / 2). Values are
    # multiplied by `attention_value_scale`. Loading moves this factor into `o_proj`.
    use_gemma_norm: bool = False
    rope_is_neox_style: bool = True
    attention_value_scale: float = 1.0
    # MLP's activation "swigluoai": gate and up projections are limited, and the gate's sigmoid is scaled by alpha.
    hidden_act: str = "silu"
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    # Features to context: Laguna's drafts norm each captured layer's features, and each layer norms its context.
    norms_features: bool = False
    # The mask token's embedding replaces the target's. It is a row of an embedding in the files, or a file of its own.
    has_embed_tokens: bool = False
    has_mask_embedding: bool = False
    embeds_scaled: bool = True  # tokens are embedded with the target's factor (Gemma's sqrt(H)); False: without
    sample_from_anchor: bool = False  # slot i predicts the token of slot i + 1, so N slots give N drafts
    full_is_causal: bool = False  # a slot of a full layer attends to no later slot
    gating: str = ""  # softplus gate on attention's output: one per head ("per-head") or "per-element"; "": none
    attention_sink_bias: bool = False  # each head has a sink: a logit that adds to the softmax's denominator only
    draft_vocab_size: int | None = None  # number of tokens that can be drafted, listed in `d2t`; None: all
    shift_label: bool = False  # Domino: slot i predicts the token of slot i + 1, and the last slot nothing
    gru_hidden_dim: int = 0  # Domino: width of the state that summarises the tokens drafted so far; 0: no Domino
    emb_dim: int = 0  # Domino: rank of the correction of the logits
    lilicorr: LiLiCorrSizes | None = None  # head that chooses among each slot's candidates; None: no LiLiCorr
    mask_file: str = field(default="", compare=False)  # path of mask_embedding.pt; "": none
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
        if bool(self.gru_hidden_dim) != bool(self.emb_dim):
            raise ValueError(f"{path}: config.json sets only one of gru_hidden_dim and emb_dim; set both as trained")
        if self.gru_hidden_dim and (self.selector_rank or self.draft_vocab_size or self.vocab_size is None):
            raise ValueError(
                f"{path}: a Domino draft has vocab_size and the whole vocabulary, and no selector; fix config.json"
            )
        self._check_lilicorr()
        if self.selector_rank and self.draft_vocab_size:
            raise ValueError(
                f"{path}: draft_vocab_size {self.draft_vocab_size} with a candidate selector, which needs the whole "
                "vocabulary; fix config.json"
            )

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

    def _check_lilicorr(self) -> None:
        """Check the fields of a LiLiCorr head."""
        sizes = self.lilicorr
        if sizes is None:
            return
        others = ("selector_rank", "gru_hidden_dim", "draft_vocab_size", "sample_from_anchor")
        if found := [name for name in others if vars(self)[name]]:
            raise ValueError(f"{self.path}: {found[0]} is set, and a LiLiCorr draft has no such part; fix config.json")
        width = sizes.hidden_size or self.hidden_size
        if width % sizes.num_heads:
            raise ValueError(
                f"{self.path}: lilicorr_num_heads {sizes.num_heads} does not divide the head's width {width}; "
                "fix config.json"
            )
        if self.vocab_size is None or sizes.candidate_topk > self.vocab_size:
            raise ValueError(
                f"{self.path}: lilicorr_candidate_topk {sizes.candidate_topk} exceeds vocab_size {self.vocab_size}; "
                "fix config.json"
            )

    @property
    def n_drafts(self) -> int:
        """Return D, the number of drafts of a block: the slots less one, or all slots with `sample_from_anchor`."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def has_mask_row(self) -> bool:
        """Return whether the draft embeds the mask token by a row of its own."""
        return self.has_embed_tokens or self.has_mask_embedding

    @property
    def rotary_width(self) -> int:
        """Return the number of a head's first dimensions that are rotated."""
        return self.rope_parameters.get("rope_dim", self.head_dim)

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

    def narrowed(self, window: int | None) -> "Checkpoint":
        """Return the draft with layers that attend to at most `window` tokens, including the slot; None: itself.

        Raises:
            NotSupported: full and sliding layers would get different windows, or mask later slots differently.
        """
        if window is None or (self.window is not None and self.window <= window):
            return self
        causal = self.full_is_causal if FULL in self.layer_types else self.sliding_is_causal
        if SLIDING in self.layer_types and (window > (self.sliding_window or 0) or causal != self.sliding_is_causal):
            raise NotSupported(
                f"a draft window of {window} tokens is not supported with --disaggregation-mode for {self.path} "
                f"(beside full layers it has sliding layers of {self.sliding_window} tokens, and attention backends "
                "have one window for all layers, and one mask in a block); drop --speculative-draft-window-size"
            )
        sliding = (SLIDING,) * self.num_hidden_layers
        return replace(self, layer_types=sliding, sliding_window=window, sliding_is_causal=causal, full_is_causal=False)

    def unlike_z_lab(self) -> list[str]:
        """Return the names of the fields by which this draft's computation differs from z-lab's DFlash and DFlash 2."""
        names = ("norms_features", "full_is_causal", "gating", "lilicorr", *RARE, *(ADDED.keys() - SECOND.keys()))
        unlike = [name for name in names if vars(self)[name] != Checkpoint.__dataclass_fields__[name].default]
        return sorted([*unlike, *(["rope_dim"] if self.rotary_width != self.head_dim else [])])

    def to_json(self) -> dict[str, Any]:
        """Return the content of a config.json, for plain weights, that SGLang, vLLM and `parse` can read."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        dflash = {name: fields.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        dflash |= {name: value for name in ADDED if (value := fields.pop(name)) != ADDED[name]}
        if self.gru_hidden_dim:
            dflash["shift_label"] = self.shift_label  # SGLang requires it
        del fields["lilicorr"]
        dflash |= {PREFIX + name: value for name, value in self.lilicorr._asdict().items()} if self.lilicorr else {}
        rare = {name: fields.pop(name) for name in RARE}
        is_laguna, gating = fields.pop("norms_features"), fields.pop("gating")
        architecture = fields.pop("architecture")
        causal = True if fields.pop("full_is_causal") else None
        is_causal = causal if fields.pop("sliding_is_causal") else False
        del fields["borrowed"], fields["path"], fields["packing"], fields["mask_file"]
        theta = self.rope_parameters["rope_theta"]
        return {
            "architectures": [DFLASH_2 if self.selector_rank and architecture == DFLASH else architecture],
            "model_type": "qwen3",
            "hidden_act": self.hidden_act,
            **{name: value for name, value in fields.items() if value is not None},
            **{name: value for name, value in rare.items() if value != type(self).__dataclass_fields__[name].default},
            # In Transformers 4 rope_theta, whose default is 10,000, overrides rope_parameters.
            **({} if theta == 10_000 else {"rope_theta": theta}),
            "use_sliding_window": self.sliding_window is not None,
            **({} if is_causal is None else {"is_causal": is_causal}),
            **({"gating": gating or "disabled"} if gating or is_laguna else {}),
            "tie_word_embeddings": False,
            "dflash_config": {
                "block_size": self.block_size,
                **({"projector_type": "domino", "pure_draft_prefix_len": 1} if self.gru_hidden_dim else {}),
                **dflash,
            },
        }
