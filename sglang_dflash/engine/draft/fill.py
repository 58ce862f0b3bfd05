"""Last part of the draft's forward: tokens from hidden states, by the target's head.

By default every slot gets the token with the largest logit. DFlash 2's selector, Domino's rollout and LiLiCorr choose
each draft given others of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_dflash.engine.draft.layout import Layout
from sglang_dflash.engine.draft.target_ends import TargetEnds, likeliest

# Function that chooses drafts: (hidden states of the predicting slots [T, H], starts, int64 [B], the target's ends) ->
# drafts, int64 [B, D]. A start is the anchor's token, or for LiLiCorr the request's row in the request table.
Pick = Callable[[torch.Tensor, torch.Tensor, TargetEnds], torch.Tensor]


class Filling(NamedTuple):
    """Way in which a kind of draft fills blocks."""

    layout: Layout
    pick: Pick | None  # function that chooses the drafts; None: every slot gets the token with the largest logit
    by_row: bool = False  # `pick` gets requests' rows instead of anchors, and needs all slots of the block


class Blocks(NamedTuple):
    """Blocks to fill."""

    tokens_BN: torch.Tensor  # int64, anchors and mask tokens
    rows_B: torch.Tensor  # int64, rows of the requests in the request table


def filled(
    hidden_TH: torch.Tensor,
    blocks: Blocks,
    filling: Filling,
    ends: TargetEnds,
    n_filled: int | None = None,
) -> torch.Tensor:
    """Return the blocks with their drafts, see `Layout.returned`: int64 [B, N], or only the first tokens.

    Args:
        hidden_TH: the draft's last hidden states, T = B x N rows.
        blocks: anchors and mask tokens, and rows of their requests.
        ends: the target's embedding and head.
        n_filled: number of tokens to return, anchor included, at least 2; None, or more than the block's: the whole
            block.
    """
    (B, N), H = blocks.tokens_BN.shape, hidden_TH.shape[-1]
    layout, pick, by_row = filling
    # The slots of all requests form one batch of rows, so that the head is read only once.
    slots_TH = layout.predicting(hidden_TH.view(B, N, H), None if by_row else n_filled).flatten(0, 1)
    begin_B = blocks.rows_B if by_row else blocks.tokens_BN[:, 0]
    drafts_BD = likeliest(slots_TH, ends).view(B, -1) if pick is None else pick(slots_TH, begin_B, ends)
    drafts_BD = drafts_BD if n_filled is None else drafts_BD[:, : n_filled - 1]
    return layout.returned(blocks.tokens_BN, drafts_BD)
