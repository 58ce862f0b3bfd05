"""DFlash draft as an SGLang model: one forward turns blocks of mask tokens into draft tokens.

The draft has no head. `attach` stores the target's embedding and head in the draft, so that one forward (one CUDA
graph) maps token ids to token ids. The draft's context is the target's hidden states (features), from which
`context_kv` computes K and V for every layer. The model is independent of requests, steps and acceptance.

Kinds of drafts differ in the answers to five questions. These modules answer them from the fields of the checkpoint:

    how a config is read              dialects.py, checkpoint.py
    how features become context       context.py
    how a block is laid out           layout.py
    what a slot attends to            attention.py
    how hidden states become tokens   fill.py, target_ends.py, second.py, domino.py, lilicorr.py

Paper: DFlash, arXiv 2602.06036, section 3. Dimensions: T rows (B requests x N block tokens, or packed prompt tokens), L
draft layers, G KV heads, E head width, H hidden, C features (captured layers x H).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from torch import nn

from sglang_dflash.engine.draft import checkpoint, tensors
from sglang_dflash.engine.draft.attention import FP32_SINKS, DraftAttention
from sglang_dflash.engine.draft.context import ContextProjection, FeatureNorms
from sglang_dflash.engine.draft.domino import Domino
from sglang_dflash.engine.draft.files import own_name
from sglang_dflash.engine.draft.fill import Blocks, Filling, filled
from sglang_dflash.engine.draft.layout import Layout
from sglang_dflash.engine.draft.lilicorr import Last, LiLiCorr
from sglang_dflash.engine.draft.mask_row import MASK_ROW, read_row
from sglang_dflash.engine.draft.packed import unpacked
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.engine.draft.rotary import reach, rotary_of
from sglang_dflash.engine.draft.second import SGLangBlockConv, SGLangCandidateSelector, convolved
from sglang_dflash.engine.draft.sglang_config import as_served
from sglang_dflash.engine.draft.target_ends import TargetEnds, unscaled, with_copy, with_own_mask
from sglang_dflash.engine.draft.weights import (
    QUANTIZED,
    checkpoint_names,
    is_unused,
    lay_side_by_side,
    loader_of,
    require_all_known,
    require_known,
)


class DraftMLP(nn.Module):
    """Gated MLP: down(silu(gate x) * up x), [T, H] -> [T, H]."""

    def __init__(self, config: Checkpoint, quant_config: QuantizationConfig | None) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [wide] * 2, bias=False, quant_config=quant_config)
        self.down_proj = RowParallelLinear(wide, hidden, bias=False, quant_config=quant_config)
        self.act = Swiglu(config) if config.hidden_act == "swigluoai" else SiluAndMul()

    def forward(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(hidden_TH)
        return self.down_proj(self.act(gate_up))[0]


class Swiglu(nn.Module):
    """Activation "swigluoai" of gate and up projections side by side, [T, 2 I] -> [T, I]."""

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(self.alpha * gate) * (up + 1)).to(gate_up.dtype)


class DraftLayer(nn.Module):
    """Pre-norm layer. The residual is passed separately, because SGLang's norms add it to the hidden states."""

    def __init__(
        self, config: Checkpoint, layer_id: int, rotary: RotaryEmbedding, quant_config: QuantizationConfig | None
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config, layer_id, rotary, quant_config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(config, quant_config)
        self.attention_conv, self.mlp_conv = SGLangBlockConv.of(config), SGLangBlockConv.of(config)

    def forward(
        self, positions_T: torch.Tensor, hidden_TH: torch.Tensor, residual_TH: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and residual, both [T, H]; `residual_TH` is None in the first layer."""
        if residual_TH is None:
            residual_TH, hidden_TH = hidden_TH, self.input_layernorm(hidden_TH)
        else:
            hidden_TH, residual_TH = self.input_layernorm(hidden_TH, residual_TH)

        def attend(hidden_TH: torch.Tensor) -> torch.Tensor:
            return self.self_attn(positions_T, hidden_TH, batch)

        block_size = hidden_TH.shape[0] // batch.batch_size
        hidden_TH = convolved(self.attention_conv, attend, hidden_TH, block_size)
        hidden_TH, residual_TH = self.post_attention_layernorm(hidden_TH, residual_TH)
        return convolved(self.mlp_conv, self.mlp, hidden_TH, block_size), residual_TH


class DFlashDraftModel(nn.Module):
    """Draft model: computes draft tokens from blocks of mask tokens, and context K/V from target features.

    SGLang builds the model and loads the checkpoint. Then the worker calls `attach` once. `draft.checkpoint` has
    checked the config, so its fields are not checked again.
    """

    # These attributes are set by `attach`.
    ends: TargetEnds
    context: ContextProjection
    k_norm_LE: torch.Tensor  # weights of the norm of K

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        """Build the layers. `config`: a Transformers config with the fields of `Checkpoint.to_json`."""
        super().__init__()
        self.config = config
        self.fields = fields = as_served(checkpoint.parse(config.to_dict(), config._name_or_path))
        hidden, eps, n_captured = fields.hidden_size, fields.rms_norm_eps, len(fields.target_layer_ids)
        rotary = rotary_of(fields, *get_rope_config(config))
        self.layers = nn.ModuleList(
            [DraftLayer(fields, i, rotary, quant_config) for i in range(fields.num_hidden_layers)]
        )
        self.norm = RMSNorm(hidden, eps=eps)
        # A linear layer of SGLang's, because only the weights of such layers are packed on a CPU.
        self.fc = ReplicatedLinear(n_captured * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps=eps)
        self.aux_hidden_norms = nn.ModuleList(
            [RMSNorm(hidden, eps=eps) for _ in range(n_captured if fields.norms_features else 0)]
        )
        self.candidate_selector, self.domino = SGLangCandidateSelector.of(fields), Domino.of(fields)
        self.lilicorr = LiLiCorr.of(fields)
        choosing = self.candidate_selector or self.domino or self.lilicorr
        if fields.draft_vocab_size:
            d2t_D = torch.zeros(fields.draft_vocab_size, dtype=torch.int64)
            self.d2t = nn.Parameter(d2t_D, requires_grad=False)
        if fields.has_mask_row:
            self.mask_embedding = nn.Parameter(torch.zeros(hidden), requires_grad=False)
        layout = Layout.of(sample_from_anchor=fields.sample_from_anchor, shift_label=fields.shift_label)
        self.filling = Filling(layout, None if choosing is None else choosing.path, by_row=self.lilicorr is not None)
        self.needed, self.loaded = checkpoint_names(dict(self.named_parameters())), set[str]()

    def forward_embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's embeddings of token ids, [T] -> [T, H].

        If a draft model has this method, SGLang's graph runner passes token ids to `forward` instead of embeddings.
        """
        return self.ends.embed(input_ids)

    def get_attention_sliding_window_size(self) -> int | None:
        """Return the number of tokens before the current one in sliding windows; None without sliding layers."""
        return None if self.fields.sliding_window is None else self.fields.sliding_window - 1

    def attach(self, ends: TargetEnds, max_position: int, backend: str = "", *, fp8_head: bool = False) -> None:
        """Store the target's embedding and head, and stack the layers' weights that `context_kv` uses.

        Args:
            ends: the target's embedding and head.
            max_position: number of served positions, one more than the largest position.
            backend: attention backend, from which follows the dtype of attention sinks.
            fp8_head: round the head's rows to fp8.
        Raises:
            ValueError: a tensor was not loaded.
        """
        if missing := sorted(self.needed - self.loaded):
            raise ValueError(f"the draft's load format left out {missing[0]!r}; drop --speculative-draft-load-format")
        ends = with_copy(ends, self.d2t if self.fields.draft_vocab_size else None, fp8=fp8_head)
        if not self.fields.embeds_scaled:
            ends = ends._replace(embed=unscaled(ends.embed))
        if self.fields.has_mask_row:
            ends = ends._replace(embed=with_own_mask(ends.embed, self.fields.mask_token_id, self.mask_embedding))
        # `object.__setattr__` bypasses nn.Module, so that the target's weights do not become parameters of the draft.
        object.__setattr__(self, "ends", ends)
        attentions = self.attentions
        if self.fields.attention_sink_bias and backend in FP32_SINKS:
            for attention in attentions:
                attention.attention_sink_bias.data = attention.attention_sink_bias.float()
        reach(attentions[0].rotary_emb, max_position)
        is_laguna = self.fields.norms_features
        input_norms = [cast(DraftLayer, layer).input_layernorm for layer in self.layers]
        self.context = ContextProjection(self._fuse(), attentions, input_norms if is_laguna else None)
        self.k_norm_LE = lay_side_by_side([a.k_norm.weight for a in attentions])

    def make_room(self, n_rows: int) -> None:
        """Allocate what the draft keeps for each row of the request table. Call this before graphs are captured."""
        if self.lilicorr is not None:
            self.lilicorr.make_room(n_rows)

    def _fuse(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function from features [T, C] to hidden states [T, H]."""
        if not self.fields.norms_features:
            return lambda features_TC: self.hidden_norm(self.fc(features_TC)[0])
        normed = FeatureNorms([cast(RMSNorm, norm) for norm in self.aux_hidden_norms], self.fields.rms_norm_eps)
        return lambda features_TC: self.hidden_norm(self.fc(normed(features_TC))[0])

    @property
    def attentions(self) -> list[DraftAttention]:
        return [cast(DraftLayer, layer).self_attn for layer in self.layers]

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        n_filled: int | None = None,
    ) -> LogitsProcessorOutput:
        """Replace the mask tokens of the blocks by drafts.

        Args:
            input_ids: int64 [B * N], for each block its anchor and N - 1 mask tokens.
            positions: int64 [B * N].
            n_filled: number of tokens of each block to return; None: all, which SGLang's graph runner needs.
        Returns:
            SGLang's output type, whose `hidden_states` are the tokens of `Layout.returned`, int64 [B * N] for a whole
            block. SGLang's graph runner returns one row of this field per input token.
        """
        hidden_TH, residual_TH = self.forward_embed(input_ids), None
        for layer in self.layers:
            hidden_TH, residual_TH = layer(positions, hidden_TH, residual_TH, forward_batch)
        hidden_TH, _ = self.norm(hidden_TH, residual_TH)
        blocks = Blocks(input_ids.view(forward_batch.batch_size, -1), forward_batch.req_pool_indices)
        tokens_BN = filled(hidden_TH, blocks, self.filling, self.ends, n_filled)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=tokens_BN.view(-1))

    def context_kv(self, features_TC: torch.Tensor, last: Last | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K (before norm and rope) and V of the context, for all layers: two tensors [T, L, G, E].

        `last`: a LiLiCorr draft keeps the context of these tokens; None: of no token.
        """
        context_TH = self.context.fuse(features_TC)
        if last is not None and self.lilicorr is not None:
            self.lilicorr.last.keep(last, context_TH)
        return self.context.kv(context_TH)

    @property
    def is_quantized(self) -> bool:
        """Return whether the layers' projections were quantized while loading. `attach` must have been called."""
        return self.context.qkv_LXH is None

    # -- weights --------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint, or update some of its tensors while serving.

        Raises:
            ValueError: a tensor is unknown, a quantized draft is updated, or an update has another d2t.
            AssertionError, RuntimeError: a tensor has a wrong shape (raised by SGLang's loaders).
        """
        parameters = dict(self.named_parameters())
        plain = unpacked(weights, self.config.packing, self.norm.weight.dtype)
        weights = tensors.apart(self.fields, ((own_name(name), tensor) for name, tensor in plain))
        weights = chain(weights, self._own_mask())
        if self.needed <= self.loaded:
            if self.is_quantized:
                raise ValueError(QUANTIZED)
            weights = list(weights)  # a generator, iterated twice
            require_all_known((name for name, _ in weights), parameters)
            self._require_same_vocabulary(dict(weights).get("d2t"))
        for name, tensor in weights:
            if not is_unused(name, parameters):
                fused, shard = require_known(name, parameters)
                loader_of(parameters[fused])(parameters[fused], tensor, *shard)
                self.loaded.add(name)

    def _own_mask(self) -> list[tuple[str, torch.Tensor]]:
        """Return the row in the draft's `mask_embedding.pt`, with its name; nothing if there is no such file to load.

        The path is then removed from the config, so later updates do not load the row again.
        """
        file, self.config.mask_file = self.config.mask_file, ""
        return [(MASK_ROW, read_row(self.fields, Path(file)))] if file else []

    def _require_same_vocabulary(self, d2t_D: torch.Tensor | None) -> None:
        """Check that an update keeps the reduced vocabulary, whose rows of the head were copied at the start."""
        if self.fields.draft_vocab_size and d2t_D is not None and not torch.equal(d2t_D.to(self.d2t), self.d2t):
            raise ValueError(
                "d2t lists other tokens than that of the served draft; restart the server with the new draft"
            )


EntryClass = DFlashDraftModel
