"""Servers started by their command lines, as users do, give Transformers' answers."""

from collections.abc import Callable

import pytest

from tests.server.lib.variants import VARIANTS

MAX_NEW_TOKENS = 48


@pytest.mark.parametrize("arm", ["off", pytest.param("stock", marks=pytest.mark.full), "plugin"])
def test_greedy_answers_are_those_of_transformers(
    server: Callable, questions: Callable, reference: Callable, arm: str
) -> None:
    prompts = questions(6)
    expected = [reference(prompt, MAX_NEW_TOKENS) for prompt in prompts]
    asked = server(arm, flags=VARIANTS["hybrid"].flags if arm == "plugin" else (), typed=True)
    for concurrency in (1, 6):
        answers = asked.generate_many(prompts, concurrency=concurrency, max_new_tokens=MAX_NEW_TOKENS)
        assert [answer.token_ids for answer in answers] == expected
    assert any("spec_verify_ct" in answer.meta for answer in answers) == (arm != "off")


def test_server_is_started_once(server: Callable) -> None:
    assert server("off") is server("off")
