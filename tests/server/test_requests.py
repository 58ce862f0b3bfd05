"""What a request may carry: served as without speculation, or refused with a sentence."""

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from launch.server import Server, ServerError
from tests.server.variants import VARIANTS

MAX_NEW_TOKENS = 48


@pytest.fixture(scope="module")
def ours(server: Callable) -> Server:
    return server(flags=VARIANTS["hybrid"].flags)


@pytest.fixture(scope="module")
def off(server: Callable) -> Server:
    return server("off")


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 4},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_cannot_be_exact_is_refused_by_name(ours: Server, questions: Callable, asked: dict[str, float]) -> None:
    (prompt,) = questions(1)
    name = next(iter(asked))
    with pytest.raises(ServerError, match=rf"answered 400: .*does not support {name} with DFLASH"):
        ours.generate(prompt, max_new_tokens=8, **asked)
    assert ours.generate(prompt, max_new_tokens=8).token_ids  # and the server lives


def test_logit_bias_changes_the_answer_as_without_speculation(ours: Server, off: Server, questions: Callable) -> None:
    for prompt in questions(3, seed=3):
        favoured = off.generate(prompt, max_new_tokens=4).token_ids[2]
        options = {"max_new_tokens": MAX_NEW_TOKENS, "logit_bias": {str(favoured): 3.0, "17": -100.0}}
        assert ours.generate(prompt, **options).token_ids == off.generate(prompt, **options).token_ids


@pytest.mark.parametrize(
    "rule", [{"regex": r"The sum is [0-9]{2,4}\. (Yes|No)"}, {"json_schema": '{"type": "object"}'}]
)
def test_a_grammar_holds_and_gives_the_same_text(
    ours: Server, off: Server, questions: Callable, rule: dict[str, str]
) -> None:
    for prompt in questions(3, seed=4):
        answers = [server.generate(prompt, max_new_tokens=24, **rule) for server in (ours, off)]
        assert answers[0].token_ids == answers[1].token_ids


def test_greedy_sampled_and_constrained_requests_share_a_batch(ours: Server, off: Server, questions: Callable) -> None:
    prompts = questions(9, seed=6)
    mix = [{}, {"temperature": 0.8, "top_p": 0.9}, {"regex": "[a-z ]{12}"}]
    bodies = [{"max_new_tokens": 32, **mix[i % 3]} for i in range(9)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt, body: ours.generate(prompt, **body), prompts, bodies))
    for i, answer in enumerate(together):
        if i % 3 != 1:
            assert answer.token_ids == off.generate(prompts[i], **bodies[i]).token_ids


def test_logprobs_are_those_without_speculation(ours: Server, off: Server, questions: Callable) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 3}
    for prompt in questions(3, seed=7):
        metas = [s.generate(prompt, fields=fields, max_new_tokens=MAX_NEW_TOKENS).meta for s in (ours, off)]
        ours_TL, off_TL = ([(token, logprob) for logprob, token, _ in meta["output_token_logprobs"]] for meta in metas)
        assert [token for token, _ in ours_TL] == [token for token, _ in off_TL]
        assert all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(ours_TL, off_TL, strict=True))
        for a, b in zip(*(meta["output_top_logprobs"] for meta in metas), strict=True):
            assert {token for _, token, _ in a} == {token for _, token, _ in b}


def test_sampled_tokens_follow_the_target_s_distribution(ours: Server, off: Server, questions: Callable) -> None:
    """The first decoded token after the prompt's own, over many draws, on and off: within 5 standard errors."""
    (prompt,) = questions(1, seed=8)
    n, options = 400, {"temperature": 1.5, "top_p": 0.95, "max_new_tokens": 3}
    counts = []
    for s in (ours, off):
        answers = s.generate_many([prompt] * n, concurrency=8, **options)
        counts.append(Counter(tuple(answer.token_ids[:3]) for answer in answers))
    for outcome in counts[0] | counts[1]:
        a, b = counts[0][outcome] / n, counts[1][outcome] / n
        pooled = (a + b) / 2
        assert abs(a - b) <= 5 * math.sqrt(2 * pooled * (1 - pooled) / n), (outcome, a, b)
    assert len(counts[1]) > 3, "the draws show no randomness; this test could not fail"
