"""Fixtures of tests about the demo."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split


@pytest.fixture
def letters() -> Tokenizer:
    """Return a tokenizer with one token per letter."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2, "d": 3, "<": 4}, unk_token="a"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return tokenizer
