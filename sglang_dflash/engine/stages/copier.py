"""Copy: replace a block's last guesses by an n-gram copy (prompt lookup) from the request's own token history.

A copy proposes the tokens that followed an earlier occurrence of the same n-gram. Histories are on the device, in a
table with the rows of SGLang's request table. When a prompt has been read, the whole prompt is written to its history,
including a cached prefix. Each step writes its verified tokens directly after the history. The next step's prefix
length determines which of these tokens belong to the history.

For each request, the success of copies in its earlier steps decides whether a block gets a copy, and from which slot on
(`kernels/copy_draft.py`, `kernels/weigh_copies.py`). The target still verifies one chain of tokens, so other stages do
not distinguish copies from drafts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.utils import async_h2d, async_h2d_stack
from sglang_dflash_kernels.accept import Accepted
from sglang_dflash_kernels.copy_draft import COPY_DRAFT, N_CLASSES, Copied, Texts
from sglang_dflash_kernels.weigh_copies import WEIGH_COPIES

from sglang_dflash.engine import saver
from sglang_dflash.engine.memory.slots import n_prompts
from sglang_dflash.engine.step import Plan
from sglang_dflash.flags import Copy

NO_TEXT = -1  # replaces history entries outside the vocabulary, such as SGLang's placeholder ids of images


class Copier(Protocol):
    """Interface of the stage."""

    def read(self, batch: ScheduleBatch) -> None:
        """Write the token history of requests whose prompt, or a chunk of it, has been read.

        A running request in a mixed step has read its anchor, which becomes part of its history.
        """

    def copy(self, plan: Plan, drafts_BN: torch.Tensor) -> CopyStep:
        """Replace the last guesses of a block by a copy, if the copy is expected to have more accepted tokens.

        Args:
            drafts_BN: int64 [B, width]: anchor, drafts, then mask tokens if the width exceeds the block.
        """

    def weigh(self, step: CopyStep, accepted: Accepted) -> None:
        """Count the gain of each n-gram match, copied or not, if all guesses before its place were right.

        The gain is the number of accepted drafts with the copy, minus the number with the draft model's guesses alone.
        """

    def totals(self) -> list[list[int]]:
        """Return two counts for each class of match lengths: blocks with a copy, and accepted copied drafts.

        Counts are since the last `forget`. The list is empty on a server without copies. This waits for the device.
        """

    def forget(self) -> None:
        """Set all counts to zero. Call this only while no request runs."""


class CopyStep(NamedTuple):
    """Tokens that a step verifies, and the copies among them."""

    tokens_BN: torch.Tensor  # int64 [B, width], to be verified
    drafts_BN: torch.Tensor  # int64 [B, width], the block before copying
    made: tuple[Copied, Texts] | None = None  # result and input of `copy_draft`; None: nothing could be copied


class NoCopies:
    """Copier of a server without copies."""

    def read(self, batch: ScheduleBatch) -> None:
        """Do nothing."""
        return

    def copy(self, plan: Plan, drafts_BN: torch.Tensor) -> CopyStep:
        """Return the drafts unchanged."""
        return CopyStep(drafts_BN, drafts_BN)

    def weigh(self, step: CopyStep, accepted: Accepted) -> None:
        """Do nothing."""
        return

    def totals(self) -> list[list[int]]:
        """Return no counts."""
        return []

    def forget(self) -> None:
        """Do nothing."""
        return


class TextCopies:
    """Copier that copies from each request's own history.

    Invariant when a step begins: text_QM[r, :prefix_len] is the history before the anchor, for the request in row r.
    """

    def __init__(self, req_to_token: torch.Tensor, vocab_size: int, widest: int) -> None:
        """Store an empty history for each row of `req_to_token`, SGLang's request table [Q, M].

        `widest`: largest verify width.
        """
        self.vocab_size, self.device = vocab_size, req_to_token.device
        with saver.kv_cache():  # `read` writes a request's whole history again
            self.text_QM = torch.zeros_like(req_to_token, dtype=torch.int32)
        self.counts_QK2 = torch.zeros(len(req_to_token), N_CLASSES, 2, dtype=torch.int32, device=self.device)
        self.totals_K2 = torch.zeros_like(self.counts_QK2[0])  # over all requests, see `totals`
        # Zero between searches. Searches of all steps run on one stream, so they can use the same memory.
        self.scratch_S = torch.zeros(len(req_to_token) * widest, dtype=torch.int32, device=self.device)
        self.copy_draft, self.weigh_copies = COPY_DRAFT.form_for(req_to_token), WEIGH_COPIES.form_for(req_to_token)

    def read(self, batch: ScheduleBatch) -> None:
        """Write the whole history of each prompt's request, cached parts included, and reset its counts."""
        n = n_prompts(batch)
        if n < len(batch.reqs):
            prefix_B = async_h2d(batch.prefix_lens[n:], dtype=torch.int64, device=self.device)
            self.text_QM[batch.req_pool_indices[n:], prefix_B] = batch.input_ids[n - len(batch.reqs) :].to(torch.int32)
        rows = [req.kv.req_pool_idx for req in batch.reqs[:n]]
        texts = [np.asarray(req.get_fill_ids()) for req in batch.reqs[:n]]
        text_T_cpu = np.concatenate([np.where(text < self.vocab_size, text, NO_TEXT) for text in texts], dtype=np.int32)
        (text_T,) = async_h2d_stack([torch.from_numpy(text_T_cpu)], device=self.device)
        for row, text in zip(rows, text_T.split([len(text) for text in texts]), strict=True):
            self.text_QM[row, : len(text)] = text
        self.counts_QK2[async_h2d(rows, dtype=torch.int64, device=self.device)] = 0

    def copy(self, plan: Plan, drafts_BN: torch.Tensor) -> CopyStep:
        """Copy at each block's first trusted match (`kernels/copy_draft.py`), and write the block after the history."""
        texts = Texts(plan.prefix_len_B, plan.rows_B, self.text_QM, self.counts_QK2)
        copied = self.copy_draft(drafts_BN, texts, self.scratch_S)
        if plan.width == 1:  # nothing was drafted or copied, but the anchor has joined the history
            return CopyStep(drafts_BN, drafts_BN)
        return CopyStep(copied.tokens_BN, drafts_BN, (copied, texts))

    def weigh(self, step: CopyStep, accepted: Accepted) -> None:
        """Add the gains (see `Copier.weigh`) to each request's counts, by class of match lengths."""
        if step.made is not None:
            (copied, texts), committed = step.made, (accepted.committed_BN, accepted.n_committed_B)
            self.weigh_copies(step.drafts_BN, copied, *committed, texts, totals_K2=self.totals_K2)

    def totals(self) -> list[list[int]]:
        return self.totals_K2.tolist()

    def forget(self) -> None:
        """Set the counts of all requests and the totals to zero."""
        self.totals_K2.zero_()
        self.counts_QK2.zero_()


class RandomCopies(TextCopies):
    """Copier for tests. In each step each request trusts random classes of match lengths, equal on all ranks."""

    def __init__(self, req_to_token: torch.Tensor, vocab_size: int, widest: int) -> None:
        super().__init__(req_to_token, vocab_size, widest)
        self.generator = torch.Generator(self.device).manual_seed(0)

    def copy(self, plan: Plan, drafts_BN: torch.Tensor) -> CopyStep:
        """Draw the trusted classes of matches, then copy."""
        self.counts_QK2.random_(-8, 9, generator=self.generator)
        return super().copy(plan, drafts_BN)


def make_copier(copy: Copy, req_to_token: torch.Tensor, vocab_size: int, widest: int) -> Copier:
    """Return the copier of this server.

    Args:
        req_to_token: SGLang's request table [Q, M].
        widest: largest verify width.
    """
    if copy is Copy.OFF:
        return NoCopies()
    return (RandomCopies if copy is Copy.RANDOM else TextCopies)(req_to_token, vocab_size, widest)
