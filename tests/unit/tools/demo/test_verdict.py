"""Comparison of two answers."""

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from sglang_dflash.tools.demo.verdict import common_start, difference


def test_the_common_start_ends_before_a_divided_character() -> None:
    """With one token per byte, fox and owl begin with the same three tokens."""
    vocabulary = {byte: n for n, byte in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    assert common_start(tokenizer, "a\N{FOX FACE}", "a\N{OWL}") == ("a", 1)


def test_answers_must_be_equal(letters: Tokenizer) -> None:
    assert not difference(("ab", "ab"), letters)
    assert difference(("ab", "ac"), letters) == "The answers differ after 1 tokens, which is a bug to report."
