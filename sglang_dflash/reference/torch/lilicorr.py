"""LiLiCorr's choice among candidates: a small transformer scores each pair of candidates of neighbouring slots.

Every slot has K candidates, its most likely tokens. A candidate's state is computed from its token's embedding, the
slot's hidden state, five numbers about its probability, and embeddings of slot and rank. In each layer every candidate
of a block attends to all others, with a bias for the distance of their slots. Each candidate has two unit vectors,
computed from its state and from the context before the anchor. The out vector is for the step to the next slot, the in
vector for the step from the previous slot. The score of a pair is the scaled product of the earlier candidate's out
vector and the later candidate's in vector. For the first slot a vector of the context replaces the out vector.

Source: SGLang 0.5.23 `models/lilicorr.py`, which has the same parameter names. No published draft is known.
Shapes: X blocks, D drafts, K candidates, H hidden, W width of a candidate's state, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dflash.engine.draft.lilicorr_fields import N_NUMBERS
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.reference.torch.attention import Norm


class Block(NamedTuple):
    """Inputs of X blocks."""

    token_XDK: torch.Tensor  # int64, candidates, the most likely first
    log_p_XDK: torch.Tensor  # fp32, their log-probabilities over the whole vocabulary
    embedding_XDKH: torch.Tensor  # the target's embeddings of the candidates
    hidden_XDH: torch.Tensor  # the draft's hidden states
    context_XH: torch.Tensor  # `Draft.fused` of the token before the anchor


class Mlp(nn.Module):
    def __init__(self, n_in: int, n_inner: int, n_out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(n_in, n_inner), nn.Linear(n_inner, n_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class Attention(nn.Module):
    """Attention of all candidates of a block to all others."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_XSW: torch.Tensor, bias_ASS: torch.Tensor) -> torch.Tensor:
        """Return [X, S, W] for S = D x K candidates; `bias_ASS` is added to the scores of the A heads."""
        projected = F.linear(x_XSW, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias_ASS
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Checkpoint, width: int) -> None:
        super().__init__()
        sizes = config.lilicorr
        assert sizes is not None
        inner = int(width * sizes.mlp_ratio)
        self.attn_norm, self.mlp_norm = (Norm(width, eps=config.rms_norm_eps) for _ in range(2))
        self.attn, self.mlp = Attention(width, sizes.num_heads), Mlp(width, inner, width)

    def forward(self, x_XSW: torch.Tensor, bias_ASS: torch.Tensor) -> torch.Tensor:
        x_XSW = x_XSW + self.attn(self.attn_norm(x_XSW), bias_ASS)
        return x_XSW + self.mlp(self.mlp_norm(x_XSW))


class LiLiCorr(nn.Module):
    """Scores of pairs of candidates, and the best path through them."""

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        sizes, hidden, N = config.lilicorr, config.hidden_size, config.block_size
        assert sizes is not None
        self.sizes, self.width = sizes, sizes.hidden_size or hidden
        width, n_candidates = self.width, sizes.candidate_topk
        self.token_proj = nn.Linear(hidden, width) if width != hidden else None
        self.pass_hidden_proj, self.context_proj = nn.Linear(hidden, width), nn.Linear(hidden, width)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(N_NUMBERS), Mlp(N_NUMBERS, width, width)
        self.slot_embedding = nn.Parameter(0.1 * torch.randn(1, 1, N - 1, 1, width))
        self.rank_embedding = nn.Parameter(0.1 * torch.randn(1, 1, 1, n_candidates, width))
        self.relative_slot_bias = nn.Parameter(0.1 * torch.randn(sizes.num_heads, 2 * N - 1))
        self.same_slot_bias = nn.Parameter(0.1 * torch.randn(sizes.num_heads))
        self.layers = nn.ModuleList(Layer(config, width) for _ in range(sizes.num_layers))
        self.output_norm, self.anchor_norm = (Norm(width, eps=config.rms_norm_eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(width, sizes.factor_dim) for _ in range(3))

    def candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K most likely tokens, int64 [..., K], and their log-probabilities, fp32 [..., K]."""
        log_p, tokens = logits.float().log_softmax(-1).topk(self.sizes.candidate_topk, dim=-1)
        return tokens, log_p

    def scores(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the first slot's candidates, fp32 [X, K], and of pairs, fp32 [X, D - 1, K, K].

        The score at [x, d, i, j] is that of candidate j of slot d + 1 after candidate i of slot d.
        """
        D, K = block.log_p_XDK.shape[1:]
        state_XDKW = self._states(block).flatten(1, 2)
        bias_ASS = self._bias(D, K)
        for layer in self.layers:
            state_XDKW = layer(state_XDKW, bias_ASS)
        state_XDKW = self.output_norm(state_XDKW).unflatten(1, (D, K))
        context_XW = self.anchor_norm(self.context_proj(block.context_XH))
        context_XDKW = context_XW[:, None, None].expand_as(state_XDKW)
        factors = torch.cat([state_XDKW, context_XDKW, state_XDKW * context_XDKW], dim=-1)
        factors = F.silu(self.factor_input_proj(factors))
        out_XDKF, in_XDKF, start_XF = map(
            self._unit, (self.out_head(factors), self.in_head(factors), self.anchor_out_head(context_XW))
        )
        first_XK = (in_XDKF[:, 0] @ start_XF[..., None])[..., 0]
        pairs = out_XDKF[:, :-1] @ in_XDKF[:, 1:].transpose(-1, -2)
        return self.sizes.logit_scale * first_XK.float(), self.sizes.logit_scale * pairs.float()

    def walk(self, block: Block) -> torch.Tensor:
        """Return the greedy path, int64 [X, D]: in each slot the best candidate after the previous slot's choice."""
        first_XK, pairs = self.scores(block)
        chosen = [first_XK.argmax(-1)]
        at = torch.arange(len(first_XK), device=first_XK.device)
        for d in range(pairs.shape[1]):
            chosen.append(pairs[at, d, chosen[-1]].argmax(-1))
        return block.token_XDK.gather(2, torch.stack(chosen, dim=1)[..., None])[..., 0]

    def _states(self, block: Block) -> torch.Tensor:
        """Return the candidates' states before the first layer, [X, D, K, W]."""
        log_p = block.log_p_XDK
        D, K = log_p.shape[1:]
        rank = torch.arange(K, device=log_p.device).expand_as(log_p)
        numbers = [log_p, log_p.exp(), log_p - log_p.max(-1, keepdim=True).values, rank / max(K - 1, 1), rank == 0]
        numbers_XDK5 = torch.stack([number.to(block.hidden_XDH.dtype) for number in numbers], dim=-1)
        token = block.embedding_XDKH.to(block.hidden_XDH.dtype)
        token = token if self.token_proj is None else self.token_proj(token)
        state = token + self.pass_hidden_proj(block.hidden_XDH)[:, :, None]
        state = state + self.feature_mlp(self.feature_norm(numbers_XDK5))
        return state + self.slot_embedding[0, :, :D] + self.rank_embedding[0]

    def _bias(self, n_slots: int, n_candidates: int) -> torch.Tensor:
        """Return what is added to attention's scores, [heads, D x K, D x K]."""
        slot = torch.arange(n_slots, device=self.same_slot_bias.device).repeat_interleave(n_candidates)
        distance = slot[:, None] - slot
        middle = self.relative_slot_bias.shape[1] // 2
        same = self.same_slot_bias[:, None, None] * (distance == 0)
        return self.relative_slot_bias[:, distance + middle] + same

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(cast(torch.Tensor, x), dim=-1, eps=self.sizes.vector_eps)
