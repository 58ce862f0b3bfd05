"""n-gram copies from the token history of one sequence: the reference for the batches of `engine/stages/copier.py`."""

from collections.abc import Sequence

import torch
from sglang_dflash_kernels.copy_draft import N_CLASSES, Texts, copy_draft_ref
from sglang_dflash_kernels.weigh_copies import weigh_copies_ref

from sglang_dflash.engine.draft.generation import DecodedStep


class Copies:
    """Token history of one sequence, and the counts that decide if a copy is trusted (see `kernels/copy_draft.py`)."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.text = list(prompt)
        self.counts_1K2 = torch.zeros(1, N_CLASSES, 2, dtype=torch.int32)
        self.totals_K2 = torch.zeros(N_CLASSES, 2, dtype=torch.int32)

    def copy(self, tokens_N: torch.Tensor) -> torch.Tensor:
        """Return the tokens to verify, int64 [N]: the block, with its last guesses replaced by a copy if trusted."""
        self.block_1N, N = tokens_N.cpu()[None], len(tokens_N)
        self.texts = Texts(
            torch.tensor([len(self.text)]),
            torch.zeros(1, dtype=torch.int64),
            torch.tensor([self.text + [0] * N], dtype=torch.int32),
            self.counts_1K2,
        )
        self.copied = copy_draft_ref(self.block_1N, self.texts)
        return self.copied.tokens_BN[0].to(tokens_N.device)

    def weigh(self, step: DecodedStep) -> None:
        """Count the gain of n-gram matches in the last block, copied or not, and extend the history.

        A match counts if all guesses before it equal the committed tokens. `step` must not be cut by `ended`.
        """
        committed_1N = torch.zeros_like(self.block_1N)
        committed_1N[0, : len(step.committed)] = torch.tensor(step.committed)
        n_committed_1 = torch.tensor([len(step.committed)], dtype=torch.int32)
        weigh_copies_ref(self.block_1N, self.copied, committed_1N, n_committed_1, self.texts, totals_K2=self.totals_K2)
        self.text += [int(self.block_1N[0, 0]), *step.committed[:-1]]


class NoCopies:
    """Replacement of `Copies` that copies nothing."""

    def copy(self, tokens_N: torch.Tensor) -> torch.Tensor:
        return tokens_N

    def weigh(self, step: DecodedStep) -> None:
        return
