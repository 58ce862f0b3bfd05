"""What decode steps came to, counted on the host once their outcome is there. Knows no Prometheus and no SGLang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol


class Request(Protocol):
    """As far as counting asks a request of SGLang's."""

    is_retracted: bool

    def finished(self) -> bool: ...


class Tally:
    """Counts since it was made.

    It counts the requests that the scheduler counts in their `meta_info`. Under the overlap schedule a step may still
    verify a block of a request that has ended or was retracted: that outcome is not counted.
    """

    def __init__(self) -> None:
        self.n_steps = Counter[int]()  # by width; a batch's step is one
        self.n_blocks = Counter[tuple[int, int]]()  # by width and accepted drafts; every request of a batch has one
        self.n_cut_blocks = Counter[int]()  # by committed tokens; cut: drafted with less context than its window

    def add(self, width: int, n_accepted_B: Sequence[int], is_cut_B: Sequence[bool]) -> None:
        """A step of requests that go on.

        Args:
            width: how many tokens of each block were verified.
            n_accepted_B: drafts accepted, 0..width - 1.
            is_cut_B: whether a cached prefix is missing from what the draft saw.
        """
        if not n_accepted_B:
            return
        self.n_steps[width] += 1
        for n_accepted, is_cut in zip(n_accepted_B, is_cut_B, strict=True):
            self.n_blocks[width, n_accepted] += 1
            if is_cut:
                self.n_cut_blocks[n_accepted + 1] += 1

    def committed(self) -> Counter[int]:
        """Blocks by the tokens they committed."""
        found = Counter[int]()
        for (_, n_accepted), n in self.n_blocks.items():
            found[n_accepted + 1] += n
        return found

    def by_position(self) -> tuple[Counter[int], Counter[int]]:
        """How many drafts were verified, and accepted, at each slot of the block from 1 on."""
        verified, accepted = Counter[int](), Counter[int]()
        for (width, n_accepted), n in self.n_blocks.items():
            verified.update(dict.fromkeys(range(1, width), n))
            accepted.update(dict.fromkeys(range(1, n_accepted + 1), n))
        return verified, accepted


def goes_on(request: Request) -> bool:
    return not (request.is_retracted or request.finished())
