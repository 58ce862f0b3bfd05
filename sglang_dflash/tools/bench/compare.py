"""Comparison of answers, and the gate: with `--require-equal` answers must be equal before any speed is shown.

The scores of two tokens can be so close that another batch shape swaps them, mostly in precisions below fp32. A
difference is a near tie if both of its tokens are within `--tie-gap` nats of the first arm's likeliest token. The gate
accepts near ties. By default `--tie-gap` is 0, and no difference is accepted.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

Tokens = Sequence[int | str]  # token ids of an answer, or the characters of its text if ids cannot be compared
Likeliest = Callable[[Sequence[int]], Mapping[int, float]]  # log-probabilities of the likeliest tokens after a context
N_NAMED = 3  # number of differences that a GateError names at most


class GateError(RuntimeError):
    """Error for answers that differ between arms although they must be equal."""


class Difference(NamedTuple):
    """First place where an answer differs from the reference."""

    prompt: int  # index of the prompt in its task
    position: int  # index of the token, or of the character
    expected: int | str | None  # token of the reference; None: the reference has ended
    found: int | str | None  # token of the answer; None: the answer has ended

    def __str__(self) -> str:
        unit = "character" if str in (type(self.expected), type(self.found)) else "token"
        expected, found = ("the end" if one is None else repr(one) for one in (self.expected, self.found))
        return f"prompt {self.prompt + 1}, {unit} {self.position + 1}: expected {expected}, found {found}"


class Unequal(NamedTuple):
    """A difference from the first arm's answer."""

    where: str  # arm, task and concurrency
    difference: Difference
    context: Sequence[int]  # token ids of the prompt and of the equal part of the answer; empty if unknown


def differences(reference: Sequence[Tokens], answers: Sequence[Tokens]) -> list[Difference]:
    """Return the first difference of each answer from its reference; equal answers have none."""
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
    """Return whether both tokens of a difference are within `gap` nats of the first arm's likeliest token."""
    top = likeliest(unequal.context) if unequal.context else {}
    expected, found = unequal.difference.expected, unequal.difference.found
    return max(lead(top, expected), lead(top, found)) <= gap


def require_equal(unequal: Sequence[Unequal], first: str, likeliest: Likeliest, gap: float) -> int:
    """Return the number of differing answers. All must be near ties within `gap` nats; if `gap` is 0, none may differ.

    Raises:
        GateError: a difference is not a near tie.
    """
    red = [one for one in unequal if not (gap and is_near_tie(one, likeliest, gap))]
    if red:
        shown = "; ".join(f"{one.where}, {one.difference}" for one in red[:N_NAMED])
        cure = f"raise --tie-gap {gap:g}" if gap else "in bf16, accept near ties of SGLang servers with --tie-gap 0.25"
        raise GateError(
            f"{len(red)} answers differ from those of {first}, so no speed is shown; {shown}; "
            f"{cure}, or give --no-require-equal"
        )
    return len(unequal)
