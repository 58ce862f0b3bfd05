"""Modules that DFlash 2 adds to the draft model, in SGLang's form. `reference/torch/second.py` has the torch form.

Dimensions: T rows (B requests x N block tokens), D = N - 1 drafts, H hidden, S taps, J groups of channels, V
vocabulary, K candidates, R rank of the selector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang_dflash_kernels.block_conv import BLOCK_CONV
from sglang_dflash_kernels.select_path import SELECT_PATH
from torch import nn

from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.engine.draft.target_ends import TargetEnds, best_candidates


class SGLangBlockConv(nn.Module):
    """Convolutions before and after one sublayer. Every rank has all weights, because it has all hidden states."""

    def __init__(self, hidden_size: int, n_taps: int, group_size: int) -> None:
        super().__init__()
        self.shape = (-1, 2, n_taps, hidden_size // group_size)
        self.base_kernel = nn.Parameter(torch.zeros(2, n_taps, hidden_size), requires_grad=False)
        self.kernel_projection = nn.Linear(hidden_size, 2 * n_taps * self.shape[-1], bias=False)
        self.convolve = BLOCK_CONV.form_for(self.base_kernel)

    @classmethod
    def of(cls, config: Checkpoint) -> SGLangBlockConv | None:
        """Return the convolutions of a draft; None if it has none."""
        if not config.conv_kernel_size:
            return None
        return cls(config.hidden_size, config.conv_kernel_size, config.conv_group_size)


def convolved(
    conv: SGLangBlockConv | None,
    sublayer: Callable[[torch.Tensor], torch.Tensor],
    hidden_TH: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Run the sublayer between its two convolutions, or alone if `conv` is None: [T, H] -> [T, H]."""
    if conv is None:
        return sublayer(hidden_TH)
    before_TSJ, after_TSJ = conv.kernel_projection(hidden_TH).view(conv.shape).unbind(1)
    hidden_TH = conv.convolve(hidden_TH, before_TSJ, conv.base_kernel[0], block_size=block_size)
    return conv.convolve(sublayer(hidden_TH), after_TSJ, conv.base_kernel[1], block_size=block_size)


class SGLangCandidateSelector(nn.Module):
    """Selector that chooses each slot's draft among the slot's candidates.

    Every rank has all rows of the codebooks, because each rank computes the drafts of all its requests.
    """

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        n_vocab, rank = config.vocab_size or 0, config.selector_rank
        self.n_candidates = config.selector_top_k
        self.multiplier, self.cap = config.output_multiplier, config.final_logit_softcapping
        self.predecessor_codebook = nn.Parameter(torch.zeros(n_vocab, rank), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.zeros(n_vocab, rank), requires_grad=False)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.walk = SELECT_PATH.form_for(self.predecessor_codebook)

    @classmethod
    def of(cls, config: Checkpoint) -> SGLangCandidateSelector | None:
        """Return the selector of a draft; None if it has none."""
        return cls(config) if config.selector_rank else None

    def path(self, hidden_TH: torch.Tensor, anchor_B: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
        """Return the drafts, int64 [B, D]: in each slot the candidate with the best score after the previous token.

        Args:
            hidden_TH: last hidden states of the drafted slots, T = B x D rows, contiguous.
            anchor_B: int64, tokens of slot 0; may be strided.
            ends: the target's embedding and head.
        """
        tokens_TK, logits_TK = best_candidates(hidden_TH, ends, self.n_candidates)
        logits_TK *= self.multiplier
        if self.cap is not None:
            logits_TK = self.cap * torch.tanh(logits_TK / self.cap)
        blocks = len(anchor_B), -1
        return self.walk(
            tokens_TK.unflatten(0, blocks),
            logits_TK.unflatten(0, blocks),
            self.hidden_projection(hidden_TH).unflatten(0, blocks),
            anchor_B.contiguous(),  # it may be a strided column of the blocks, and kernels index flat memory
            predecessor_VR=self.predecessor_codebook,
            successor_VR=self.successor_codebook,
        )
