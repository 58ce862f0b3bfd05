"""Domino's rollout: drafts of a block one after another, each corrected by the tokens drafted before it.

A GRU reads the anchor and the drafts so far. Its state and a slot's hidden state give a correction of the slot's
logits. The first draft has no correction. Only a slot's `CANDIDATES` best tokens can be drafted, as on a server.

Source: SpecForge's `DominoDraftModel`, which has the same parameter names.
Shapes: X blocks, D drafts, H hidden, V vocabulary, G width of the GRU's state.
"""

from collections.abc import Callable

import torch
from torch import nn

from sglang_dflash.engine.draft.record import CANDIDATES, Checkpoint


class Domino(nn.Module):
    """GRU and MLP of the correction."""

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        hidden, state, rank = config.hidden_size, config.gru_hidden_dim, config.emb_dim
        self.prefix_gru = nn.GRU(hidden, state, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + state, rank, bias=False), nn.SiLU(), nn.Linear(rank, config.vocab_size or 0, bias=False)
        )

    def states(self, tokens: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the GRU's state after each of the tokens, int64 [X, S] -> [X, S, G]."""
        return self.prefix_gru(embed(tokens))[0]

    def corrected(self, logits: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] plus their corrections, for slots with hidden states [..., H] and states [..., G]."""
        return logits + self.embed_proj(torch.cat([hidden, state], dim=-1))

    def walk(
        self,
        hidden_XDH: torch.Tensor,
        logits_XDV: torch.Tensor,
        anchor_X: torch.Tensor,
        embed: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the drafts, int64 [X, D]."""
        path_XS = torch.stack([anchor_X, logits_XDV[:, 0].argmax(-1)], dim=1)
        for d in range(1, logits_XDV.shape[1]):
            state_XG = self.states(path_XS, embed)[:, -1]
            scores_XV = self.corrected(logits_XDV[:, d], hidden_XDH[:, d], state_XG)
            least_X1 = logits_XDV[:, d].topk(min(CANDIDATES, logits_XDV.shape[-1])).values[:, -1:]
            scores_XV = scores_XV.masked_fill(logits_XDV[:, d] < least_X1, -torch.inf)
            path_XS = torch.cat([path_XS, scores_XV.argmax(-1, keepdim=True)], dim=1)
        return path_XS[:, 1:]
