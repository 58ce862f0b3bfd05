"""Attention of a draft layer, and the norm that it shares with the rest of the draft.

Shapes: R sequences, A blocks per sequence, N slots per block, T context tokens, S context tokens or slots, H hidden, G
key/value heads, Q query heads per key/value head, E head width.
"""

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.reference.torch.rope import Rotation, rotate


class Norm(nn.RMSNorm):
    """RMS norm in its input's dtype.

    Under autocast the weight is cast to this dtype, because PyTorch's fused kernel needs equal dtypes.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Norm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Norm(config.head_dim, eps=config.rms_norm_eps)
        self.attention_sink_bias = None
        if config.attention_sink_bias:
            self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads))
        self.g_proj = None
        if config.gating:
            n_gates = config.num_attention_heads if config.gating == "per-head" else q_size
            self.g_proj = nn.Linear(config.hidden_size, n_gates, bias=False)

    def heads(self, flat: torch.Tensor) -> torch.Tensor:
        """Split heads: [..., S, heads * E] -> [..., heads, S, E]."""
        return flat.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)

    def key_value(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Project [..., S, H] to keys and values, [..., G, S, E] each, for context features or slots of a block."""
        return rotate(self.k_norm(self.heads(self.k_proj(hidden))), rotation), self.heads(self.v_proj(hidden))

    def forward(
        self,
        hidden_RANH: torch.Tensor,
        rotation: Rotation,
        context_RGTE: tuple[torch.Tensor, torch.Tensor],
        visible_RANK: torch.Tensor,
    ) -> torch.Tensor:
        """Attend from the slots, [R, A, N, H], to context and block.

        `visible_RANK` (bool, K = T + N: context, then block) marks the keys that each slot attends to. The blocks of a
        sequence share its context, so one product computes all scores with the context, without copies of the keys.
        """
        R, A, N, _ = hidden_RANH.shape
        query = rotate(self.q_norm(self.heads(self.q_proj(hidden_RANH))), rotation) * self.head_dim**-0.5
        key_RAGNE, value_RAGNE = self.key_value(hidden_RANH, rotation)
        key_RGTE, value_RGTE = context_RGTE
        T, E, G = key_RGTE.shape[2], self.head_dim, key_RGTE.shape[1]
        query_RGQANE = query.view(R, A, G, -1, N, E).permute(0, 2, 3, 1, 4, 5)
        to_context = (query_RGQANE.flatten(2, 4) @ key_RGTE.mT).view(*query_RGQANE.shape[:-1], T)
        to_block = query_RGQANE @ key_RAGNE.permute(0, 2, 1, 4, 3)[:, :, None]
        scores = torch.cat([to_context, to_block], dim=-1).masked_fill(~visible_RANK[:, None, None], -torch.inf)
        shares = self.shares(scores).to(value_RGTE.dtype)
        of_context, of_block = shares.split([T, N], dim=-1)
        out_RGQANE = (of_context.flatten(2, 4) @ value_RGTE).view_as(query_RGQANE)
        out_RGQANE = out_RGQANE + of_block @ value_RAGNE.transpose(1, 2)[:, :, None]
        out_RANE = out_RGQANE.permute(0, 3, 4, 1, 2, 5).reshape(R, A, N, -1)  # E: all heads side by side
        return self.o_proj(out_RANE if self.g_proj is None else self.gated(out_RANE, self.g_proj(hidden_RANH)))

    def shares(self, scores_RGQANK: torch.Tensor) -> torch.Tensor:
        """Return the softmax over keys. A sink is one more key, whose value is zero."""
        dtype = torch.promote_types(scores_RGQANK.dtype, torch.float32)
        if self.attention_sink_bias is None:
            return scores_RGQANK.softmax(-1, dtype=dtype)
        _, G, Q, *_ = scores_RGQANK.shape
        sinks = self.attention_sink_bias.view(G, Q, 1, 1, 1).expand(*scores_RGQANK.shape[:-1], 1)
        return torch.cat([scores_RGQANK, sinks.to(scores_RGQANK.dtype)], dim=-1).softmax(-1, dtype=dtype)[..., :-1]

    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Multiply each head of `out`, or each of its elements, by the softplus of its gate."""
        gate = F.softplus(gate.float()).to(out.dtype)
        return out * gate.repeat_interleave(out.shape[-1] // gate.shape[-1], dim=-1)
