"""Comparison of the two answers to a question. Both servers compute in fp32, so the answers must be equal."""

from tokenizers import Tokenizer


def difference(answers: tuple[str, str], tokenizer: Tokenizer) -> str:
    """Return a sentence for the user about different answers; "" if they are equal."""
    if answers[0] == answers[1]:
        return ""
    return f"The answers differ after {common_start(tokenizer, *answers)[1]} tokens, which is a bug to report."


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
