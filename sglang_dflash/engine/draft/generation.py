"""Result of a decode step, without torch or MLX types, and a function that cuts it where the answer ends."""

from collections.abc import Container
from typing import NamedTuple


class DecodedStep(NamedTuple):
    """Result of one forward of the target. The first step reads the prompt, has no drafts and commits one token."""

    committed: list[int]  # accepted drafts, then the bonus; cut at a stop token or at max_new_tokens
    n_accepted: int  # number of accepted drafts, before any cut


def ended(step: DecodedStep, stop_token_ids: Container[int], n_left: int) -> DecodedStep:
    """Return the step with its tokens cut after the first stop token, and to at most `n_left` tokens."""
    committed = step.committed[:n_left]
    ends = [i for i, token in enumerate(committed) if token in stop_token_ids]
    return DecodedStep(committed[: ends[0] + 1] if ends else committed, step.n_accepted)
