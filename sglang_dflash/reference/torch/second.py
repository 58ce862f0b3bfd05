"""DFlash 2's additions to a draft: convolutions around every sublayer, and a selector among candidate tokens.

All slots of a block are filled at once, so their argmax tokens may belong to different continuations. Both additions
make slots depend on each other. A convolution mixes each slot with earlier slots of its block. The selector keeps the
best tokens of every slot, and scores each of them given the token chosen for the previous slot.

Published by z-lab and Inco AI (August 2026). SGLang 0.5.23 has the same computation in `models/dflash.py`, and reads
these parameter names.

Shapes: N slots of a block, D = N - 1 drafts, H hidden, S taps, J groups of channels, V vocabulary, K candidates, R
rank; X blocks, and `...` for any leading dimensions.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dflash.engine.draft.record import Checkpoint


class BlockConv(nn.Module):
    """Two depthwise convolutions over the slots of a block: before and after a sublayer.

    Each kernel is the sum of two terms. The first term is a parameter of each channel and equal for all slots. The
    second is shared by a group of channels, and computed from the slot's hidden state before the first convolution.
    """

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        self.n_taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        n_groups = config.hidden_size // config.conv_group_size
        base = torch.zeros(2, self.n_taps, config.hidden_size)  # before, after
        base[:, 0] = 1  # an untrained convolution is the identity
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.n_taps * n_groups, bias=False)

    def kernels(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernels before and after the sublayer, [..., N, S, H] each, for `hidden` [..., N, H]."""
        change = self.kernel_projection(hidden).unflatten(-1, (2, self.n_taps, -1))
        before, after = (self.base_kernel + change.repeat_interleave(self.group_size, dim=-1)).unbind(-3)
        return before, after


def convolved(
    conv: BlockConv | None, sublayer: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """Apply the sublayer with `conv` around it, if any: [..., N, H] -> [..., N, H]."""
    if conv is None:
        return sublayer(hidden)
    before, after = conv.kernels(hidden)
    return convolve(sublayer(convolve(hidden, before)), after)


def convolve(hidden: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Return out[n] = sum over taps s of kernel[n, s] * hidden[n - s] per channel, zero-padded before the block.

    `hidden` [..., N, H], `kernel` [..., N, S, H].
    """
    N, n_taps = kernel.shape[-3:-1]
    slots_before = (F.pad(hidden[..., : max(0, N - s), :], (0, 0, min(s, N), 0)) for s in range(n_taps))
    terms = (kernel[..., s, :] * before for s, before in enumerate(slots_before))
    return torch.stack(list(terms)).sum(0)


class CandidateSelector(nn.Module):
    """Selector of one draft per slot. The score of a candidate is its logit plus a score with the previous token."""

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        n_vocab, rank = config.vocab_size or 0, config.selector_rank
        self.n_candidates = config.selector_top_k
        self.multiplier, self.cap = config.output_multiplier, config.final_logit_softcapping
        self.predecessor_codebook = nn.Parameter(torch.zeros(n_vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(n_vocab, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K best tokens, int64 [..., K], and their logits after multiplier and soft cap, fp32 [..., K]."""
        best, tokens = logits.float().topk(self.n_candidates, dim=-1)
        return tokens, self.unary(best)

    def unary(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the tokens' own scores, fp32: their logits after multiplier and soft cap."""
        scaled = logits.float() * self.multiplier
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)

    def edges(self, previous: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the pairwise score of each candidate after the previous token, [..., K].

        Args:
            previous: int64 [...].
            hidden: [..., H], hidden state of the slot to fill.
            tokens: int64 [..., K], the slot's candidates.
        """
        wanted = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        return (wanted[..., None, :] * self.successor_codebook[tokens]).sum(-1)

    def walk(self, hidden_XDH: torch.Tensor, logits_XDV: torch.Tensor, anchor_X: torch.Tensor) -> torch.Tensor:
        """Return the greedy path from the anchors, int64 [X, D].

        Each slot gets its best candidate, given the token chosen for the previous slot.
        """
        tokens_XDK, unary_XDK = self.candidates(logits_XDV)
        path = [anchor_X]
        for d in range(hidden_XDH.shape[1]):
            score_XK = unary_XDK[:, d] + self.edges(path[-1], hidden_XDH[:, d], tokens_XDK[:, d]).float()
            path.append(tokens_XDK[:, d].gather(1, score_XK.argmax(1, keepdim=True))[:, 0])
        return torch.stack(path[1:], dim=1)
