"""Simulated acceptance, for speed measurements without trained weights (`SGLANG_SIMULATE_ACC_LEN`).

The stage takes the place of `accept`. All other stages compute what they compute without simulation, so a step does the
same work. SGLang's own DFLASH worker reads the same variables. With `match-expected` it rounds a fractional length up
or down at random. This stage rounds down, and carries the fraction over to the next step.
"""

from __future__ import annotations

from random import Random

import torch
from sglang_dflash_kernels.accept import Accepted, tracked_slot

from sglang_dflash.flags import Simulated

FIXED_TOKEN = 100  # token of every simulated answer with the token mode "fixed", as in SGLang


class SimulatedAccept:
    """Stage that accepts a given number of drafts per step.

    The number is equal for all requests of a step, and on all ranks that serve them.
    """

    def __init__(self, simulated: Simulated) -> None:
        self.simulated = simulated
        self.random = Random(0)  # equal on all ranks that serve the same requests
        self.owed = 0.0  # fraction of a token carried over from earlier steps

    def __call__(
        self, tokens_BN: torch.Tensor, target_BN: torch.Tensor, prefix_len_B: torch.Tensor, track_interval: int = 0
    ) -> Accepted:
        """Accept the first drafts of every block; arguments as for `kernels/accept.py`."""
        n = self.next_length(target_BN.shape[1])
        committed_BN = torch.zeros_like(target_BN)
        if self.simulated.tokens == "fixed":
            committed_BN[:, :n] = FIXED_TOKEN
        else:
            committed_BN[:, : n - 1] = tokens_BN[:, 1:n]
            committed_BN[:, n - 1] = target_BN[:, n - 1]
        n_committed_B = torch.full_like(prefix_len_B, n, dtype=torch.int32)
        anchor_B = committed_BN[:, n - 1].contiguous()
        next_len_B = prefix_len_B + n
        counts = n_committed_B - 1, anchor_B, committed_BN, n_committed_B, next_len_B
        tracked_B = tracked_slot(prefix_len_B, next_len_B, track_interval)
        return Accepted(*counts, torch.full_like(prefix_len_B, n - 1), tracked_B)

    def next_length(self, width: int) -> int:
        """Return the number of tokens that the next step commits per request: 1 to `width`.

        With the method "match-expected", the mean over any run of steps differs from the length by less than one token
        divided by the number of steps. SGLang draws the rounding at random instead.
        """
        if self.simulated.method == "multinomial":
            return min(max(1, round(self.random.gauss(self.simulated.length, 1.0))), width)
        wanted = min(max(1.0, self.simulated.length), width) + self.owed
        n = int(wanted)
        self.owed = wanted - n
        return n
