"""Last part of the draft's forward: tokens from hidden states, by the target's head and DFlash 2's selector, if any."""

from __future__ import annotations

import torch

from sglang_dflash.engine.draft.second import SGLangCandidateSelector
from sglang_dflash.engine.draft.target_ends import TargetEnds, likeliest


def filled(
    hidden_TH: torch.Tensor,
    tokens_BN: torch.Tensor,
    selector: SGLangCandidateSelector | None,
    ends: TargetEnds,
    n_filled: int | None = None,
) -> torch.Tensor:
    """Return the blocks with their drafts, int64 [B, N], or only their first `n_filled` slots; slot 0 is the anchor.

    Args:
        hidden_TH: the draft's last hidden states, T = B x N rows.
        tokens_BN: int64, anchors and mask tokens.
        selector: DFlash 2's selector; None: every slot gets the token with the largest logit.
        ends: the target's embedding and head.
        n_filled: number of slots to return, at least 2; None, or more than N: the whole block.
    """
    (B, N), H = tokens_BN.shape, hidden_TH.shape[-1]
    slots_TH = hidden_TH.view(B, N, H)[:, 1:n_filled].flatten(
        0, 1
    )  # packed, so that the head is read once for all requests
    if selector is None:
        drafts_BD = likeliest(slots_TH, ends).view(B, -1)
    else:
        drafts_BD = selector.path(slots_TH, tokens_BN[:, 0], ends)
    return torch.cat([tokens_BN[:, :1], drafts_BD], dim=1)
