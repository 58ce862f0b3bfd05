"""Are the answers the same, and where do they part?"""

from collections.abc import Sequence
from typing import NamedTuple

Said = Sequence[int] | str  # an answer's token ids, or its text where the server tells no ids


class Difference(NamedTuple):
    prompt: int  # which prompt
    position: int  # which token of the answer, or which character
    expected: int | str | None  # the reference's; None where its answer had ended
    found: int | str | None

    def __str__(self) -> str:
        return f"prompt {self.prompt}, token {self.position}: expected {self.expected}, found {self.found}"


def differences(reference: Sequence[Said], answers: Sequence[Said]) -> list[Difference]:
    """The first difference of every answer that has one."""
    found = []
    for prompt, (expected, answer) in enumerate(zip(reference, answers, strict=True)):
        for position in range(max(len(expected), len(answer))):
            a, b = _at(expected, position), _at(answer, position)
            if a != b:
                found.append(Difference(prompt, position, a, b))
                break
    return found


def _at(answer: Said, position: int) -> int | str | None:
    return answer[position] if position < len(answer) else None
