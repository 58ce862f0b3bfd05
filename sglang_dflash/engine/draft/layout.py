"""Layout of a drafted block: which slot predicts which token, and how many drafts a block has.

In z-lab's drafts a slot predicts its own token, so the anchor's slot predicts nothing: N slots give N - 1 drafts. In an
anchor-first draft (`sample_from_anchor`) slot i predicts the token of slot i + 1: N slots give N drafts.
Dimensions: B requests, N slots, D drafts, W verified tokens (anchor and drafts).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """Layout of a block.

    Domino's `shift_label` is a third layout: slot i predicts the token of slot i + 1, and the last slot predicts
    nothing.

    SGLang's graph runner returns one row per slot, so a forward that fills whole blocks returns N tokens of each. With
    N - 1 drafts these are the anchor and the drafts (`n_anchors` is 1). With N drafts they are the drafts alone
    (`n_anchors` is 0).
    """

    first: int  # slot that predicts the first draft
    n_anchors: int

    @classmethod
    def of(cls, *, sample_from_anchor: bool, shift_label: bool = False) -> Layout:
        return cls(0, 0) if sample_from_anchor else cls(0 if shift_label else 1, 1)

    def n_tokens(self, n_slots: int) -> int:
        """Return the number of tokens to verify after a forward over blocks of `n_slots`: the anchor and the drafts."""
        return n_slots + 1 - self.n_anchors

    def predicting(self, slots_BNH: torch.Tensor, n_tokens: int | None) -> torch.Tensor:
        """Return the hidden states of the slots that predict the drafts, [B, D, H].

        `n_tokens`: number of verified tokens of a block; only their drafts are included. None: all drafts.
        """
        most = slots_BNH.shape[1] - self.n_anchors
        n_drafts = most if n_tokens is None else min(n_tokens - 1, most)
        return slots_BNH[:, self.first : self.first + n_drafts]

    def returned(self, tokens_BN: torch.Tensor, drafts_BD: torch.Tensor) -> torch.Tensor:
        """Return the tokens that a forward returns: anchors, if the layout has them, then drafts."""
        return torch.cat([tokens_BN[:, :1], drafts_BD], dim=1) if self.n_anchors else drafts_BD

    def verified(self, returned_BN: torch.Tensor, planned_BW: torch.Tensor) -> torch.Tensor:
        """Return the tokens to verify, int64 [B, W]: anchor, drafts, then mask tokens past the block.

        Args:
            returned_BN: tokens that the forward returned, see `returned`.
            planned_BW: anchor and mask tokens.
        """
        W = planned_BW.shape[1]
        tokens_BN = returned_BN[:, : W - 1 + self.n_anchors]
        tail = planned_BW[:, tokens_BN.shape[1] + 1 - self.n_anchors :]
        return torch.cat([tokens_BN, tail] if self.n_anchors else [planned_BW[:, :1], tokens_BN, tail], dim=1)
