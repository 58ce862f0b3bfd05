"""Are the answers the same? With `--require-equal` every measured answer is compared before any speed is shown.

In fp32 an answer differs or it does not. In a lower precision two tokens can be so close that another batch shape swaps
them; a difference is then forgiven only where the first arm itself has the two tokens on top, no further apart than a
bound fixed beforehand (`--tie-gap`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from sglang_dflash.bench.compare import Difference
from sglang_dflash.bench.engine import Engine

N_SHOWN = 3  # differences that the message names


class GateError(RuntimeError):
    """Answers differ between arms where they must not: there is no speed to show."""


class Found(NamedTuple):
    """An answer that is not the first arm's."""

    where: str  # arm, task and concurrency
    difference: Difference
    context: Sequence[int]  # token ids up to the difference; empty where they are not known


def require_equal(different: Sequence[Found], first: Engine, gap: float) -> int:
    """
    Args:
        gap: between near ties at most, in log-probability; 0: none is forgiven.

    Returns:
        How many differences are near ties.

    Raises:
        GateError: there are others.
    """
    ties: list[Found] = []
    if gap and different:
        with first.running():
            ties = [found for found in different if is_near_tie(found, first, gap)]
    red = [found for found in different if found not in ties]
    if red:
        shown = "; ".join(f"{found.where}, {found.difference}" for found in red[:N_SHOWN])
        raise GateError(f"{len(red)} answers are not {first.name}'s, so no speed is shown; {shown}")
    return len(ties)


def is_near_tie(found: Found, first: Engine, gap: float) -> bool:
    """Whether `first` itself has the two tokens on top after what both answers agree on, within `gap`."""
    top = first.likeliest(found.context) if found.context else ()
    if len(top) != 2:
        return False
    (best_logprob, best), (second_logprob, second) = top
    both = {found.difference.expected, found.difference.found}
    return {best, second} == both and best_logprob - second_logprob <= gap
