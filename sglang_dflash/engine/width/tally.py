"""Counts of decode steps and their outcomes, on the host."""

from collections import Counter
from collections.abc import Sequence


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

    def __str__(self) -> str:
        n_steps, n_blocks = self.n_steps.total(), self.n_blocks.total()
        shares = ", ".join(f"{width} in {n / n_steps:.0%}" for width, n in sorted(self.n_steps.items()))
        return f"widths of {n_steps} steps: {shares}; {self.n_committed() / n_blocks:.2f} tokens per request and step"
