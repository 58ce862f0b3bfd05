"""Comparison of the two answers to a question.

In fp32 the answers must be equal. In bf16 rounding can swap two almost equally likely tokens, and the texts then go on
differently. The log-probability gap of such a near tie is shown.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import openai
from tokenizers import Tokenizer

from sglang_dflash.tools.demo.ask import Message

TIE_GAP = 0.25  # largest difference, in nats, between the log-probabilities of a near tie


class Verdict(NamedTuple):
    """Result of a comparison, with a sentence for the user."""

    is_right: bool  # the answers are equal, or differ at a near tie between servers in bf16
    text: str


def compared(
    answers: tuple[str, str],
    messages: Sequence[Message],
    without: openai.OpenAI,
    tokenizer: Tokenizer,
    *,
    exact: bool,
) -> Verdict:
    """Compare the answers with and without speculation.

    Args:
        messages: the conversation, ending with the question.
        without: client of the server without speculation, which also returns the likeliest tokens.
        exact: whether the servers compute in fp32.
    """
    if answers[0] == answers[1]:
        return Verdict(True, "The answers are equal, character for character.")
    same, n_same = common_start(tokenizer, *answers)
    if exact:
        return Verdict(False, f"The answers differ after {n_same} tokens, which is a bug to report.")
    (first, best), (second, next_best) = likeliest(without, messages, same)
    gap, (one, other) = best - next_best, (answer[len(same) :] for answer in answers)
    swapped = (fits(one, first) and fits(other, second)) or (fits(one, second) and fits(other, first))
    if swapped and gap <= TIE_GAP:
        return Verdict(
            True,
            f"The answers are equal up to token {n_same}. There the target's two likeliest tokens are {gap:.2f} nats "
            "apart, a near tie, which bf16 rounding can swap.",
        )
    return Verdict(
        False,
        f"The answers differ after {n_same} tokens, where the target's two likeliest tokens are {gap:.2f} nats apart: "
        "no near tie, so a bug to report.",
    )


def common_start(tokenizer: Tokenizer, one: str, other: str) -> tuple[str, int]:
    """Return the longest text of whole tokens with which both texts begin, and its number of tokens."""
    encoded = tokenizer.encode(one, add_special_tokens=False)
    others = tokenizer.encode(other, add_special_tokens=False).ids
    n = next((n for n, pair in enumerate(zip(encoded.ids, others, strict=False)) if pair[0] != pair[1]), None)
    if n is None:
        n = min(len(encoded.ids), len(others))
    ends = [0, *(end for _, end in encoded.offsets)]
    while not other.startswith(one[: ends[n]]):  # a character can span several tokens
        n -= 1
    return one[: ends[n]], n


def fits(rest: str, token: str) -> bool:
    """Return whether the rest of an answer can begin with `token`. An empty rest fits: an end token has no text."""
    return rest.startswith(token) if rest else True


def likeliest(client: openai.OpenAI, messages: Sequence[Message], answer: str) -> list[tuple[str, float]]:
    """Return the target's two likeliest next tokens after a part of an answer, as text and log-probability."""
    written = [{"role": "assistant", "content": answer}] if answer else []
    completion = client.chat.completions.create(
        model="default",
        messages=cast("Any", [*messages, *written]),
        max_tokens=1,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"continue_final_message": bool(answer)},
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None  # they were asked for
    assert logprobs.content is not None
    return [(one.token, one.logprob) for one in logprobs.content[0].top_logprobs]
