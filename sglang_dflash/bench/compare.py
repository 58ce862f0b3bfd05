"""Comparison of answers, and the gate: with `--require-equal` answers are compared before any speed is shown.

In fp32 an answer differs or it does not. In a lower precision two tokens can be so close that another batch shape swaps
them. Such a difference is forgiven only if both tokens are at the top in the first arm, no further apart than a bound
fixed beforehand (`--tie-gap`).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

Said = Sequence[int | str]  # token ids of an answer, or its text if the server returns no ids
Likeliest = Callable[[Sequence[int]], Mapping[int, float]]  # log-probabilities of the next tokens after a context
N_NAMED = 3  # most differences named in the gate's message


class GateError(RuntimeError):
    """Error for answers that differ between arms but must not; no speed is shown."""


class Difference(NamedTuple):
    """First place where an answer differs from the reference."""

    prompt: int  # index
    position: int  # index of the token, or of the character
    expected: int | str | None  # in the reference; None: its answer has ended
    found: int | str | None

    def __str__(self) -> str:
        return f"prompt {self.prompt}, token {self.position}: expected {self.expected}, found {self.found}"


class Unequal(NamedTuple):
    """A difference from the first arm's answer."""

    where: str  # arm, task and concurrency
    difference: Difference
    context: Sequence[int]  # token ids before the difference; empty if unknown


def differences(reference: Sequence[Said], answers: Sequence[Said]) -> list[Difference]:
    """Return the first difference of every answer that has one."""
    found = []
    for prompt, (expected, answer) in enumerate(zip(reference, answers, strict=True)):
        for position, (a, b) in enumerate(zip_longest(expected, answer)):
            if a != b:
                found.append(Difference(prompt, position, a, b))
                break
    return found


def lead(likeliest: Mapping[int, float], token: int | str | None) -> float:
    """Return the lead of the likeliest token over `token`, in nats; infinite if `token` is not in `likeliest`."""
    return max(likeliest.values()) - likeliest[token] if isinstance(token, int) and token in likeliest else float("inf")


def is_near_tie(unequal: Unequal, likeliest: Likeliest, gap: float) -> bool:
    """Return whether both tokens are among the `likeliest` of the first arm, within `gap` nats of the top."""
    top = likeliest(unequal.context) if unequal.context else {}
    expected, found = unequal.difference.expected, unequal.difference.found
    return max(lead(top, expected), lead(top, found)) <= gap


def require_equal(unequal: Sequence[Unequal], first: str, likeliest: Likeliest, gap: float) -> int:
    """Return the number of differences, all of them near ties; `gap` 0 forgives none.

    Raises:
        GateError: there are other differences.
    """
    red = [one for one in unequal if not (gap and is_near_tie(one, likeliest, gap))]
    if red:
        shown = "; ".join(f"{one.where}, {one.difference}" for one in red[:N_NAMED])
        raise GateError(f"{len(red)} answers differ from those of {first}, so no speed is shown; {shown}")
    return len(unequal)
