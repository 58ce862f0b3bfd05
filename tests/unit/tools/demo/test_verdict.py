"""Comparison of two answers: equal, different at a near tie, or wrong."""

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from sglang_dflash.tools.demo.verdict import common_start, compared

QUESTION = [{"role": "user", "content": "Why?"}]


def client(*likeliest: tuple[str, float]) -> Any:
    """Return a client of a target with these two likeliest tokens; `asked` collects its requests."""
    asked: list[dict[str, Any]] = []

    def create(**request: Any) -> Any:
        asked.append(request)
        top = [SimpleNamespace(token=token, logprob=logprob) for token, logprob in likeliest]
        logprobs = SimpleNamespace(content=[SimpleNamespace(top_logprobs=top)])
        return SimpleNamespace(choices=[SimpleNamespace(logprobs=logprobs)])

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)), asked=asked)


@pytest.mark.parametrize(
    ("answers", "likeliest", "is_right"),
    [
        (("abc", "abdd"), (("c", -1.0), ("d", -1.1)), True),
        (("abdd", "abc"), (("c", -1.0), ("d", -1.1)), True),
        (("abc", "abd"), (("c", -1.0), ("d", -1.3)), False),  # 0.3 nats apart
        (("abc", "abd"), (("c", -1.0), ("a", -1.1)), False),  # another token is the second likeliest
        (("ab", "abd"), (("<|im_end|>", -1.0), ("d", -1.1)), True),  # one answer ends here
        (("ab", "abd"), (("<|im_end|>", -1.0), ("c", -1.1)), False),
    ],
)
def test_near_ties_in_bf16_are_no_bug(
    answers: tuple[str, str], likeliest: Any, is_right: bool, letters: Tokenizer
) -> None:
    verdict = compared(answers, QUESTION, client(*likeliest), letters, exact=False)
    assert verdict.is_right == is_right
    assert f"{likeliest[0][1] - likeliest[1][1]:.2f} nats" in verdict.text
    assert ("bug" in verdict.text) != is_right


def test_the_target_is_asked_after_the_common_start(letters: Tokenizer) -> None:
    target = client(("c", -1.0), ("d", -1.0))
    for answers in (("abc", "abd"), ("c", "d")):
        compared(answers, QUESTION, target, letters, exact=False)
    inside, at_once = target.asked
    assert inside["messages"] == [*QUESTION, {"role": "assistant", "content": "ab"}]
    assert inside["extra_body"] == {"continue_final_message": True}
    assert at_once["messages"] == QUESTION


def test_the_common_start_ends_before_a_divided_character() -> None:
    """With one token per byte, fox and owl begin with the same three tokens."""
    vocabulary = {byte: n for n, byte in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    assert common_start(tokenizer, "a\N{FOX FACE}", "a\N{OWL}") == ("a", 1)


@pytest.mark.parametrize(("answers", "is_right"), [(("ab", "ab"), True), (("ab", "ac"), False)])
def test_answers_in_fp32_must_be_equal(answers: tuple[str, str], is_right: bool, letters: Tokenizer) -> None:
    assert compared(answers, QUESTION, client(), letters, exact=True).is_right == is_right
