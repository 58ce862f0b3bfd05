"""The DFlash or DFlash 2 draft: a few transformer layers that guess a whole block of tokens in one pass.

A block is the anchor (the last committed token) followed by mask tokens. Every slot attends to the context KV, which is
projected in each layer from the features of all committed tokens before the anchor. A slot also attends to its block,
in causal layers only up to the slot itself. The draft uses the target's embedding and head.

Shapes: R sequences, A blocks per sequence, N slots per block, T context tokens, S context tokens or slots, H hidden, C
features, L layers, G key/value heads, E head width. Generation uses one block per sequence, training many blocks over
one context.

This module contains no target, sampling or loss.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.reference.torch import lilicorr
from sglang_dflash.reference.torch.attention import Attention, Norm
from sglang_dflash.reference.torch.domino import Domino
from sglang_dflash.reference.torch.rope import Rotation, rope_frequencies, rotation_at
from sglang_dflash.reference.torch.second import BlockConv, CandidateSelector, convolved


class ContextKV(NamedTuple):
    """Draft keys and values of T context tokens. `Draft.forward` requires token t at position t of the sequence."""

    keys_LRGTE: torch.Tensor  # normalised, with rotary embedding
    values_LRGTE: torch.Tensor
    fused_RTH: torch.Tensor  # fused features, `norm(fc(features))`: keys and values are projected from them

    @property
    def n_tokens(self) -> int:
        return self.keys_LRGTE.shape[3]

    def append(self, new: "ContextKV") -> "ContextKV":
        keys, values = (torch.cat(pair, dim=3) for pair in zip(self[:2], new[:2], strict=True))
        return ContextKV(keys, values, torch.cat([self.fused_RTH, new.fused_RTH], dim=1))


class Begin(NamedTuple):
    """Token of each block's anchor, int64, and the fused features of the token before it."""

    anchor_X: torch.Tensor
    context_XH: torch.Tensor

    @classmethod
    def at(cls, anchor_X: torch.Tensor, context: ContextKV, prefix_len_X: torch.Tensor) -> "Begin":
        """Return the beginnings of blocks after `prefix_len_X` tokens (int64, at least 1) of a context with R = 1."""
        return cls(anchor_X, context.fused_RTH[0, prefix_len_X - 1])


class Mlp(nn.Module):
    """Gated MLP: down(silu(gate x) * up x), [..., H] -> [..., H], or with the activation "swigluoai"."""

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act, self.alpha, self.limit = config.hidden_act, config.swiglu_alpha, config.swiglu_limit

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        if self.act == "silu":
            return self.down_proj(F.silu(gate) * up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down_proj(gate * torch.sigmoid(self.alpha * gate) * (up + 1))


class Layer(nn.Module):
    """Pre-norm layer, [R, A, N, H] -> [R, A, N, H]; arguments as for `Attention.forward`."""

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.attention_conv = BlockConv(config) if config.conv_kernel_size else None
        self.mlp_conv = BlockConv(config) if config.conv_kernel_size else None

    def forward(
        self,
        hidden_RANH: torch.Tensor,
        rotation: Rotation,
        context_RGTE: tuple[torch.Tensor, torch.Tensor],
        visible_RANK: torch.Tensor,
    ) -> torch.Tensor:
        def attend(hidden_RANH: torch.Tensor) -> torch.Tensor:
            return self.self_attn(hidden_RANH, rotation, context_RGTE, visible_RANK)

        hidden_RANH = hidden_RANH + convolved(self.attention_conv, attend, self.input_layernorm(hidden_RANH))
        return hidden_RANH + convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden_RANH))


class Draft(nn.Module):
    """The draft of a DFlash checkpoint; parameter names are the checkpoint's tensor names."""

    d2t: torch.Tensor  # int64; only with a reduced vocabulary

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.domino = Domino(config) if config.gru_hidden_dim else None
        self.lilicorr = lilicorr.LiLiCorr(config) if config.lilicorr else None
        n_norms = len(config.target_layer_ids) if config.norms_features else 0
        self.aux_hidden_norms = nn.ModuleList(Norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(n_norms))
        if config.has_mask_row:  # replaces the target's embedding of the mask token
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        if config.draft_vocab_size:  # token i of the draft is the target's token i + d2t[i]
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def context_kv(self, features_RTC: torch.Tensor, first_position: int = 0) -> ContextKV:
        """Return keys and values for the features of T consecutive tokens, the first at `first_position`."""
        if self.aux_hidden_norms:
            captured = features_RTC.chunk(len(self.aux_hidden_norms), dim=-1)
            features_RTC = torch.cat([norm(x) for norm, x in zip(self.aux_hidden_norms, captured, strict=True)], dim=-1)
        hidden_RTH = self.hidden_norm(self.fc(features_RTC))
        positions_T = torch.arange(first_position, first_position + features_RTC.shape[1], device=self.device)
        rotation = self._rotation(positions_T)
        layers = [cast(Layer, layer) for layer in self.layers]
        own = [layer.input_layernorm(hidden_RTH) if self.config.norms_features else hidden_RTH for layer in layers]
        pairs = [layer.self_attn.key_value(x, rotation) for layer, x in zip(layers, own, strict=True)]
        keys, values = zip(*pairs, strict=True)
        return ContextKV(torch.stack(keys), torch.stack(values), hidden_RTH)

    def forward(
        self,
        embeddings_RANH: torch.Tensor,
        context: ContextKV,
        prefix_len_RA: torch.Tensor,
        draft_window: int | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of every slot, after the final norm: [R, A, N, H].

        Args:
            embeddings_RANH: the target's embeddings of anchor, mask, mask, ..., see `embeddings`.
            prefix_len_RA: int64, the position of each block's anchor. Context from this position on is masked.
            draft_window: largest number of context tokens that the block attends to; None: no limit.
        """
        N = embeddings_RANH.shape[2]
        positions_RAN = prefix_len_RA[..., None] + torch.arange(N, device=self.device)
        rotation = self._rotation(positions_RAN[:, :, None])  # the same for all heads
        hidden_RANH = embeddings_RANH
        for i, layer in enumerate(self.layers):
            visible_RANK = self._visible(i, positions_RAN, context.n_tokens, draft_window)
            context_RGTE = context.keys_LRGTE[i], context.values_LRGTE[i]
            hidden_RANH = layer(hidden_RANH, rotation, context_RGTE, visible_RANK)
        return self.norm(hidden_RANH)

    def embeddings(self, tokens: torch.Tensor, embed: Any) -> torch.Tensor:
        """Return embeddings of token ids, [...] -> [..., H], by the target's module `embed`.

        Some drafts were trained without the factor by which `embed` scales the rows, or have a mask row of their own.
        """
        embedded = embed(tokens) if self.config.embeds_scaled else F.embedding(tokens, embed.weight)
        if self.config.has_mask_row:
            embedded = torch.where((tokens == self.config.mask_token_id)[..., None], self.mask_embedding, embedded)
        return embedded.to(self.dtype)

    def predicting(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that predict drafts, [..., N, H] -> [..., D, H].

        These are all slots with `sample_from_anchor`, all but the last with `shift_label`, else all but the first.
        """
        if self.config.sample_from_anchor:
            return hidden
        return hidden[..., :-1, :] if self.config.shift_label else hidden[..., 1:, :]

    def token_ids(self) -> torch.Tensor:
        """Return the target's ids of the tokens of a reduced vocabulary, int64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def list_tokens(self, tokens: torch.Tensor) -> None:
        """Set the reduced vocabulary: `tokens`, int64, and the lowest other ids if there are too few."""
        others = torch.arange(len(self.d2t) + len(tokens))
        chosen = torch.cat([tokens, others[~torch.isin(others, tokens)]])[: len(self.d2t)].sort().values
        self.d2t.copy_(chosen - torch.arange(len(chosen)))

    def listed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] with -inf for the tokens that are not in the draft's vocabulary."""
        if not self.config.draft_vocab_size:
            return logits
        outside = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
        outside[self.token_ids()] = False
        return logits.masked_fill(outside, -torch.inf)

    def guesses(
        self, hidden_XDH: torch.Tensor, logits_XDV: torch.Tensor, begin_X: Begin, embed: nn.Module
    ) -> torch.Tensor:
        """Return the drafts of X blocks, int64 [X, D]: by LiLiCorr, Domino or the selector, if any, else the argmax.

        Args:
            hidden_XDH: hidden states that predict the drafts, see `predicting`.
            logits_XDV: the target head's output for these slots.
            begin_X: anchors of the blocks, and fused features of the tokens before the anchors.
            embed: the target's embedding.
        """
        logits_XDV, anchor_X = self.listed(logits_XDV), begin_X.anchor_X
        if self.lilicorr is not None:
            tokens_XDK, log_p_XDK = self.lilicorr.candidates(logits_XDV)
            embedded = self.embeddings(tokens_XDK, embed)
            return self.lilicorr.walk(lilicorr.Block(tokens_XDK, log_p_XDK, embedded, hidden_XDH, begin_X.context_XH))
        if self.domino is not None:
            return self.domino.walk(hidden_XDH, logits_XDV, anchor_X, lambda tokens: self.embeddings(tokens, embed))
        if self.candidate_selector is None:
            return logits_XDV.argmax(-1)
        return self.candidate_selector.walk(hidden_XDH, logits_XDV, anchor_X)

    def _rotation(self, positions: torch.Tensor) -> Rotation:
        frequencies, scale = rope_frequencies(self.config)
        return rotation_at(positions, frequencies.to(self.device), scale, self.dtype)

    def _visible(self, layer: int, positions_RAN: torch.Tensor, T: int, draft_window: int | None) -> torch.Tensor:
        """Return a layer's mask, bool [R, A, N, T + N]: the context tokens and slots that each slot attends to."""
        prefix_len_RA1 = positions_RAN[..., :1]
        token_T = torch.arange(T, device=self.device)
        in_context_RAT = token_T < prefix_len_RA1
        if draft_window is not None:
            in_context_RAT = in_context_RAT & (token_T >= prefix_len_RA1 - draft_window)
        N = positions_RAN.shape[2]
        visible = torch.cat(
            [
                in_context_RAT[:, :, None].expand(-1, -1, N, -1),
                torch.ones(*positions_RAN.shape, N, dtype=torch.bool, device=self.device),
            ],
            dim=-1,
        )
        window = self.config.layer_windows[layer]
        if window is None and not self.config.full_is_causal:
            return visible
        key_positions_RAK = torch.cat([token_T.expand(*positions_RAN.shape[:2], -1), positions_RAN], dim=-1)
        distance_RANK = positions_RAN[..., None] - key_positions_RAK[:, :, None]
        if window is None:
            return visible & (distance_RANK >= 0)
        latest = 0 if self.config.sliding_is_causal else 1 - window
        return visible & (distance_RANK >= latest) & (distance_RANK < window)
