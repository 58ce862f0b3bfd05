"""Last part of the draft's forward: tokens from hidden states, by the target's head.

By default every slot gets the token with the largest logit. DFlash 2's selector and Domino's rollout choose each draft
given the drafts before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_dflash.engine.draft.layout import Layout
from sglang_dflash.engine.draft.target_ends import TargetEnds, likeliest

# (hidden states of the predicting slots [T, H], anchors int64 [B], the target's ends) -> drafts, int64 [B, D]
Pick = Callable[[torch.Tensor, torch.Tensor, TargetEnds], torch.Tensor]


class Filling(NamedTuple):
    """Way in which a kind of draft fills blocks."""

    layout: Layout
    pick: Pick | None  # function that chooses the drafts; None: every slot gets the token with the largest logit


def filled(
    hidden_TH: torch.Tensor,
    tokens_BN: torch.Tensor,
    filling: Filling,
    ends: TargetEnds,
    n_filled: int | None = None,
) -> torch.Tensor:
    """Return the blocks with their drafts, see `Layout.returned`: int64 [B, N], or only the first tokens.

    Args:
        hidden_TH: the draft's last hidden states, T = B x N rows.
        tokens_BN: int64, anchors and mask tokens.
        ends: the target's embedding and head.
        n_filled: number of tokens to return, anchor included, at least 2; None, or more than the block's: the whole
            block.
    """
    (B, N), H = tokens_BN.shape, hidden_TH.shape[-1]
    # Packed, so that the head is read once for all requests.
    layout, pick = filling
    slots_TH = layout.predicting(hidden_TH.view(B, N, H), n_filled).flatten(0, 1)
    drafts_BD = likeliest(slots_TH, ends).view(B, -1) if pick is None else pick(slots_TH, tokens_BN[:, 0], ends)
    return layout.returned(tokens_BN, drafts_BD)
