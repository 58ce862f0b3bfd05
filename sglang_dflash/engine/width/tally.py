"""Counts of decode steps and their outcomes, on the host.

`/server_info` and `/metrics` count the same blocks as a request's `spec_verify_ct`, so that their acceptance lengths
agree. `is_counted` has the rule.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol


class Request(Protocol):
    """Part of SGLang's `Req` that `is_counted` reads."""

    is_retracted: bool

    def finished(self) -> bool:
        """Return whether the request has ended."""


def is_counted(request: Request) -> bool:
    """Return whether a block of `request` counts when SGLang reads its outcome.

    With the overlap schedule a step may still verify a block of a request that has ended or was retracted. SGLang
    drops the tokens of this block, and does not count it in `spec_verify_ct`.
    """
    return not (request.is_retracted or request.finished())


class Tally:
    """Counts since construction."""

    def __init__(self) -> None:
        self.n_steps = Counter[int]()  # number of steps by width; a batch's step counts once
        self.n_blocks = Counter[tuple[int, int]]()  # number of blocks (one per request) by width and accepted drafts
        self.n_drafted, self.n_useful = 0, 0  # number of blocks with drafts, and of blocks with an accepted draft

    def add(self, width: int, n_accepted_B: Sequence[int]) -> None:
        """Count a step at `width`; `n_accepted_B`: number of accepted drafts of each request, 0..width - 1.

        Without requests, do nothing.
        """
        if n_accepted_B:
            self.n_steps[width] += 1
            self.n_blocks.update((width, n) for n in n_accepted_B)
            if width > 1:
                self.n_drafted += len(n_accepted_B)
                self.n_useful += sum(map(bool, n_accepted_B))

    def n_committed(self) -> int:
        """Return the number of committed tokens: accepted drafts, and one bonus per block."""
        return sum((n_accepted + 1) * n for (_, n_accepted), n in self.n_blocks.items())

    def acceptance_length(self) -> float:
        """Return the mean number of committed tokens per block; 0 without blocks."""
        return self.n_committed() / max(self.n_blocks.total(), 1)

    def __str__(self) -> str:
        n_steps = self.n_steps.total()
        shares = ", ".join(f"{width} in {n / n_steps:.0%}" for width, n in sorted(self.n_steps.items()))
        return f"widths of {n_steps} steps: {shares}; acceptance length {self.acceptance_length():.2f}"
