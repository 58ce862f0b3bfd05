"""LiLiCorr's choice among candidates: a small transformer scores each pair of candidates of neighbouring slots.

All candidates of a block attend to each other. A candidate's vectors are computed from its state and from the context
row of the token before the anchor. A pair's score is a product of two vectors. The first slot's draft is its best
candidate. Each further draft is the best candidate after the previous draft. The scores depend on all slots, so a block
is always filled whole.

A context row is the hidden state that `context.py` computes from a token's features. The draft's layers see the context
as K and V only. So `LastContext` keeps the last context row of every request.

Source: SGLang 0.5.23 `models/lilicorr.py`. There a request can get another request's context row after the batch has
changed. `reference/torch/lilicorr.py` has the torch form.
Dimensions: B requests, D drafts, K candidates, S = D x K, H hidden, W width of a candidate's state, F width of a
vector, R rows of the request table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dflash.engine import saver
from sglang_dflash.engine.draft.lilicorr_fields import N_NUMBERS
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.engine.draft.target_ends import TargetEnds, most_probable


class Last(NamedTuple):
    """Last token of every request among the tokens whose context is written."""

    rows_B: torch.Tensor  # int64, rows of the requests in the request table
    at_B: torch.Tensor  # int64, index of each request's last token in the written ones


class LastContext:
    """Context row of every request's last token. Row r belongs to the request in row r of the request table.

    Invariant when a block is drafted: the row is that of the token before the anchor.
    """

    def __init__(self, n_rows: int, hidden_size: int, like: torch.Tensor) -> None:
        with saver.kv_cache():  # a release loses the rows, but no request runs then, and each prompt writes its row
            self.row_RH = like.new_zeros(n_rows, hidden_size)

    def keep(self, last: Last, context_TH: torch.Tensor) -> None:
        """Store the context rows of the last tokens."""
        self.row_RH[last.rows_B] = context_TH[last.at_B]


class Mlp(nn.Module):
    def __init__(self, n_in: int, n_inner: int, n_out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(n_in, n_inner), nn.Linear(n_inner, n_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_BSW: torch.Tensor, bias_ASS: torch.Tensor) -> torch.Tensor:
        qkv = F.linear(x_BSW, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [3, B, heads, S, W / heads]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_ASS)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, n_heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.attn, self.mlp = Attention(width, n_heads), Mlp(width, inner, width)

    def forward(self, x_BSW: torch.Tensor, bias_ASS: torch.Tensor) -> torch.Tensor:
        x_BSW = x_BSW + self.attn(self.attn_norm(x_BSW), bias_ASS)
        return x_BSW + self.mlp(self.mlp_norm(x_BSW))


class LiLiCorr(nn.Module):
    """Weights of the head. Every rank has all of them, because it has all hidden states."""

    last: LastContext  # set by `make_room`

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        sizes, hidden, N, eps = config.lilicorr, config.hidden_size, config.block_size, config.rms_norm_eps
        assert sizes is not None
        self.sizes = sizes
        width, n_heads = sizes.hidden_size or hidden, sizes.num_heads
        self.token_proj = nn.Linear(hidden, width) if width != hidden else None
        self.pass_hidden_proj, self.context_proj = nn.Linear(hidden, width), nn.Linear(hidden, width)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(N_NUMBERS), Mlp(N_NUMBERS, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, N - 1, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, sizes.candidate_topk, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(n_heads, 2 * N - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(n_heads))
        inner = int(width * sizes.mlp_ratio)
        self.layers = nn.ModuleList(Layer(width, n_heads, inner, eps) for _ in range(sizes.num_layers))
        self.output_norm, self.anchor_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(width, sizes.factor_dim) for _ in range(3))

    def make_room(self, n_rows: int) -> None:
        """Allocate the context rows of a request table with `n_rows` rows. Graphs that are captured later read them."""
        self.last = LastContext(n_rows, self.context_proj.in_features, self.context_proj.weight)

    @classmethod
    def of(cls, config: Checkpoint) -> LiLiCorr | None:
        """Return the head of a draft; None if it has none."""
        return cls(config) if config.lilicorr else None

    def path(self, hidden_TH: torch.Tensor, rows_B: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
        """Return the drafts, int64 [B, D].

        Args:
            hidden_TH: last hidden states of the drafted slots, T = B x D rows, contiguous.
            rows_B: rows of the requests in the request table.
            ends: the target's embedding and head.
        """
        B = len(rows_B)
        token_TK, log_p_TK = most_probable(hidden_TH, ends, self.sizes.candidate_topk)
        token_BDK, log_p_BDK = token_TK.unflatten(0, (B, -1)), log_p_TK.unflatten(0, (B, -1))
        embedded_BDKH = ends.embed(token_TK.view(-1)).view(*token_BDK.shape, -1)
        hidden_BDH = hidden_TH.unflatten(0, (B, -1))
        state_BDKW = self._states(embedded_BDKH.to(hidden_TH.dtype), log_p_BDK, hidden_BDH)
        first_BK, pair_BDKK = self._scores(state_BDKW, self.last.row_RH[rows_B])
        best_BDK = pair_BDKK.argmax(-1)  # for each candidate the best one of the next slot
        chosen = [first_BK.argmax(-1, keepdim=True)]
        for d in range(best_BDK.shape[1]):
            chosen.append(best_BDK[:, d].gather(1, chosen[-1]))
        return token_BDK.gather(2, torch.stack(chosen, dim=1))[..., 0]

    def _states(self, token_BDKH: torch.Tensor, log_p_BDK: torch.Tensor, hidden_BDH: torch.Tensor) -> torch.Tensor:
        """Return the candidates' states before the first layer, [B, D, K, W]."""
        D, K = log_p_BDK.shape[1:]
        rank_K = torch.arange(K, device=log_p_BDK.device, dtype=torch.float32)
        fixed = (rank_K / max(K - 1, 1)).expand_as(log_p_BDK), (rank_K == 0).float().expand_as(log_p_BDK)
        numbers = torch.stack([log_p_BDK, log_p_BDK.exp(), log_p_BDK - log_p_BDK[..., :1], *fixed], dim=-1)
        state = token_BDKH if self.token_proj is None else self.token_proj(token_BDKH)
        state = state + self.pass_hidden_proj(hidden_BDH)[:, :, None]
        state = state + self.feature_mlp(self.feature_norm(numbers.to(state.dtype)))
        return state + self.slot_embedding[0, :, :D] + self.rank_embedding[0]

    def _scores(self, state_BDKW: torch.Tensor, context_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the first slot's candidates, [B, K], and of pairs, [B, D - 1, K, K]."""
        D, K = state_BDKW.shape[1:3]
        slot_S = torch.arange(D, device=state_BDKW.device).repeat_interleave(K)
        distance_SS = slot_S[:, None] - slot_S
        bias_ASS = self.relative_slot_bias[:, distance_SS + self.relative_slot_bias.shape[1] // 2]
        bias_ASS = bias_ASS + self.same_slot_bias[:, None, None] * (distance_SS == 0)
        state_BSW = state_BDKW.flatten(1, 2)
        for layer in self.layers:
            state_BSW = layer(state_BSW, bias_ASS)
        state_BSW = self.output_norm(state_BSW)
        context_B1W = self.anchor_norm(self.context_proj(context_BH))[:, None]
        parts = state_BSW, context_B1W.expand_as(state_BSW), state_BSW * context_B1W
        factors = F.silu(self.factor_input_proj(torch.cat(parts, dim=-1)))
        out_BDKF = self._unit(self.out_head(factors)).unflatten(1, (D, K))
        in_BDKF = self._unit(self.in_head(factors)).unflatten(1, (D, K))
        start_B1F = self._unit(self.anchor_out_head(context_B1W))
        # The scores are not multiplied by `logit_scale`: it is above 0, so it changes no choice.
        first_BK = (in_BDKF[:, 0] * start_B1F).sum(-1)
        return first_BK, out_BDKF[:, :-1] @ in_BDKF[:, 1:].transpose(-1, -2)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1, eps=self.sizes.vector_eps)
