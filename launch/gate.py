"""Are the outputs the same? Asked before any speed is shown, and of every run that is.

In fp32 an answer differs or it does not. In a lower precision two tokens can be so close that another batch shape swaps
them; a difference is then forgiven only where the reference itself has the two tokens on top, no further apart than a
bound fixed beforehand.
"""

from collections.abc import Sequence
from typing import NamedTuple

from launch.server import Server


class Difference(NamedTuple):
    prompt: int  # which prompt
    position: int  # which token of the answer
    expected: int | None  # the reference's token; None where its answer had ended
    found: int | None

    def __str__(self) -> str:
        return f"prompt {self.prompt}, token {self.position}: expected {self.expected}, found {self.found}"


def differences(reference: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Difference]:
    """The first difference of every answer that has one."""
    found = []
    for prompt, (expected, answer) in enumerate(zip(reference, answers, strict=True)):
        for position in range(max(len(expected), len(answer))):
            a, b = _token(expected, position), _token(answer, position)
            if a != b:
                found.append(Difference(prompt, position, a, b))
                break
    return found


def is_near_tie(difference: Difference, context: Sequence[int], server: Server, gap: float) -> bool:
    """Whether `server` itself sees the two tokens on top after `context`, within `gap` in log-probability."""
    fields = {"return_logprob": True, "top_logprobs_num": 2}
    top = server.generate(context, fields=fields, max_new_tokens=1).meta["output_top_logprobs"][0]
    (first_logprob, first_id, _), (second_logprob, second_id, _) = top
    return {first_id, second_id} == {difference.expected, difference.found} and first_logprob - second_logprob <= gap


def _token(answer: Sequence[int], position: int) -> int | None:
    return answer[position] if position < len(answer) else None
