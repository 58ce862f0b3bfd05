"""Domino's rollout: drafts of a block one after another, each corrected by the tokens drafted before it.

A GRU reads the anchor and the drafts so far. From its state and a slot's hidden state a small MLP computes corrections
of the slot's logits. The MLP's last layer has a row per token of the vocabulary. Only the rows of each slot's
`CANDIDATES` best tokens are looked up, so the layer is never read whole. The first draft has no correction.

Source: SpecForge's `DominoDraftModel`. SGLang 0.5.23 has the same computation in `speculative/domino_utils.py`, with
one set of candidates for the whole block. `reference/torch/domino.py` has the torch form.
Dimensions: T rows (B requests x D drafts), H hidden, G width of the GRU's state, R rank of the correction, V
vocabulary, K candidates.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from sglang_dflash.engine.draft.record import CANDIDATES, Checkpoint
from sglang_dflash.engine.draft.target_ends import TargetEnds, best_candidates


class Domino(nn.Module):
    """Weights of the rollout. Every rank has all of them, because it has all hidden states."""

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        hidden, state, rank, n_vocab = config.hidden_size, config.gru_hidden_dim, config.emb_dim, config.vocab_size or 0
        self.prefix_gru = nn.GRU(hidden, state, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + state, rank, bias=False), nn.SiLU(), nn.Linear(rank, n_vocab, bias=False)
        )

    @classmethod
    def of(cls, config: Checkpoint) -> Domino | None:
        """Return the rollout of a draft; None if it has none."""
        return cls(config) if config.gru_hidden_dim else None

    def path(self, hidden_TH: torch.Tensor, anchor_B: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
        """Return the drafts, int64 [B, D].

        Args:
            hidden_TH: last hidden states of the slots that predict drafts, T = B x D rows, contiguous.
            anchor_B: int64, tokens of slot 0; may be strided.
            ends: the target's embedding and head.
        """
        B, H = len(anchor_B), hidden_TH.shape[1]
        first, last = cast(nn.Linear, self.embed_proj[0]).weight, cast(nn.Linear, self.embed_proj[2]).weight
        of_hidden_RH, of_state_RG = first.split([H, first.shape[1] - H], dim=1)
        token_TK, logits_TK = best_candidates(hidden_TH, ends, min(CANDIDATES, len(last)))
        token_BDK, logits_BDK = token_TK.unflatten(0, (B, -1)), logits_TK.unflatten(0, (B, -1))
        row_BDKR = last[token_BDK]
        projected_BDR = (hidden_TH @ of_hidden_RH.T).unflatten(0, (B, -1))
        path = [token_BDK[:, 0, 0]]
        state_BG = self._read(path[0], self._read(anchor_B, None, ends), ends)
        for d in range(1, token_BDK.shape[1]):
            wanted_BR = nn.functional.silu(projected_BDR[:, d] + state_BG @ of_state_RG.T)
            change_BK = (row_BDKR[:, d] @ wanted_BR[..., None]).squeeze(-1)
            best_B1 = (logits_BDK[:, d] + change_BK).argmax(-1, keepdim=True)
            path.append(token_BDK[:, d].gather(1, best_B1)[:, 0])
            if d + 1 < token_BDK.shape[1]:
                state_BG = self._read(path[-1], state_BG, ends)
        return torch.stack(path, dim=1)

    def _read(self, token_B: torch.Tensor, state_BG: torch.Tensor | None, ends: TargetEnds) -> torch.Tensor:
        """Return the GRU's state [B, G] after one more token per request. `state_BG` None: no token was read before."""
        embedded_BH = ends.embed(token_B.contiguous())
        if state_BG is None:
            state_BG = embedded_BH.new_zeros(len(token_B), self.prefix_gru.hidden_size)
        of_input, of_state = self.prefix_gru.parameters()
        return torch.gru_cell(embedded_BH, state_BG, of_input, of_state)
