"""Prompts that must not reach a scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sglang_dflash.host.prompts import check_prompt

V = 100
MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=V))


def check(request: Any, input_ids: list[int] | None) -> list[Any]:
    """What SGLang's own check was asked."""
    asked: list[Any] = []
    check_prompt(lambda *args: asked.append(args), MANAGER, request, input_ids)
    return asked


@pytest.mark.parametrize("ids", [[0], [V - 1], [5, 0, V - 1]])
def test_tokens_of_the_vocabulary_pass(ids: list[int]) -> None:
    request = GenerateReqInput(input_ids=ids)
    assert check(request, ids) == [(MANAGER, request, ids)]


@pytest.mark.parametrize(("ids", "named"), [([5, V], V), ([-1, 5], -1), ([V + 7, -3], -3)])
def test_tokens_outside_it_are_named_with_what_it_is(ids: list[int], named: int) -> None:
    with pytest.raises(ValueError, match=rf"input_ids has {named}, .*0\.\.99$"):
        check(GenerateReqInput(input_ids=ids), ids)


@pytest.mark.parametrize("request_", [GenerateReqInput(text=""), GenerateReqInput(input_ids=[[]])])
def test_a_prompt_without_tokens_is_refused(request_: GenerateReqInput) -> None:
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        check(request_, [])


@pytest.mark.parametrize(
    ("request_", "ids"),
    [
        (GenerateReqInput(input_ids=[], session_params={"id": "a"}), []),  # the session's history is the prompt
        (GenerateReqInput(input_embeds=[[0.5]]), None),
        (GenerateReqInput(text="words"), [V + 5]),  # the tokenizer's own
        (EmbeddingReqInput(input_ids=[V]), [V]),
    ],
)
def test_what_is_no_clients_prompt_passes(request_: Any, ids: list[int] | None) -> None:
    assert check(request_, ids)


def test_sglang_is_asked_first() -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        check_prompt(refuse, MANAGER, GenerateReqInput(input_ids=[V]), [V])
