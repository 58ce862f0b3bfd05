"""Penalties on real servers, compared token by token with their definition applied to Transformers' logits.

A server without speculation cannot be the reference. Under the overlap schedule SGLang 0.5.23 counts tokens one step
late: it counts the last prompt token and misses the newest. It also forgets the output of a retracted request.
"""

from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import DeepseekOCRNoRepeatNGramLogitProcessor

from sglang_dflash.pairs.servers.server import Server
from tests.server.lib.penalised import ASKED, Rule, edited_answer, end_token, penalty_rule
from tests.server.lib.talk import logprobs_of, together, tokens_of
from tests.server.lib.variants import NO_OVERLAP, RETRACT, VARIANTS

N_PROMPTS = 12
MAX_NEW_TOKENS = 40
NGRAM = {"ngram_size": 3, "window_size": 100}

Answer = Callable[..., list[int]]


class Serving(NamedTuple):
    server: Server
    target: str
    retracts: bool


SERVINGS = {
    "hybrid": ("hybrid", VARIANTS["hybrid"].flags, {}),
    "dense-pages-chunked-retract": ("dense", VARIANTS["dense-pages-chunked-retract"].flags, dict(RETRACT)),
    "hybrid-sync": ("hybrid", (*NO_OVERLAP, *VARIANTS["hybrid"].flags), {}),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == "hybrid" else pytest.mark.full) for name in SERVINGS]
)
def serving(request: pytest.FixtureRequest, server: Callable) -> Serving:
    target, flags, env = SERVINGS[request.param]
    return Serving(server(target=target, flags=flags, env=env), target, bool(env))


@pytest.fixture(scope="module")
def answer() -> Answer:
    """Return `answer(prompt, rule, target)`, see `edited_answer`."""
    return partial(edited_answer, max_new_tokens=MAX_NEW_TOKENS)


def test_each_penalty_alone_and_in_a_mix(serving: Serving, questions: Callable, answer: Answer) -> None:
    server, target, _ = serving
    prompts, end = questions(N_PROMPTS, target, seed=25), end_token(target)
    jobs = [(prompt, asked) for i, prompt in enumerate(prompts) for asked in [ASKED[i % len(ASKED)], {}]]
    expected = [answer(prompt, penalty_rule(asked, end), target) for prompt, asked in jobs]
    changed = [expected[i] != expected[i + 1] for i in range(0, len(jobs), 2)]
    assert sum(changed) > N_PROMPTS / 2, "the penalties change too little; this test cannot fail"

    requests = [(prompt, {"max_new_tokens": MAX_NEW_TOKENS} | asked) for prompt, asked in jobs]
    for n in (1, 8):
        assert tokens_of(together(server, requests, n)) == expected, f"{n} at a time"


def test_drafts_are_still_accepted(serving: Serving, questions: Callable) -> None:
    prompts = questions(N_PROMPTS, serving.target, seed=25)
    answers = serving.server.generate_many(prompts, concurrency=1, max_new_tokens=MAX_NEW_TOKENS, presence_penalty=0.5)
    n_steps = sum(a.meta["spec_verify_ct"] for a in answers)
    assert sum(len(a.token_ids) for a in answers) > 2 * n_steps


def test_logprobs_are_those_of_the_penalised_logits(serving: Serving, questions: Callable, answer: Answer) -> None:
    server, target, _ = serving
    (prompt,) = questions(1, target, seed=22)
    asked, seen = ASKED[0], []
    penalise = penalty_rule(asked, end_token(target))

    def rule(text: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        seen.append(penalise(text, logits_V))
        return seen[-1]

    expected = answer(prompt, rule, target)
    fields = {"return_logprob": True}
    got = server.generate(prompt, fields=fields, max_new_tokens=MAX_NEW_TOKENS, **asked)
    assert got.token_ids == expected
    logprobs = logprobs_of(got)
    want = [float(logits_V.log_softmax(-1)[token]) for logits_V, token in zip(seen, expected, strict=True)]
    assert logprobs == pytest.approx(want, abs=1e-4)


def test_custom_processor_reads_the_output_so_far(serving: Serving, questions: Callable, answer: Answer) -> None:
    """SGLang's n-gram blocker needs the output so far: it bans tokens that repeat a trigram of prompt or output."""
    server, target, retracts = serving
    if retracts:
        pytest.skip("started without custom processors")
    prompts, processor = questions(4, target, seed=23), DeepseekOCRNoRepeatNGramLogitProcessor()

    def rule_for(prompt: list[int]) -> Rule:
        def rule(text: list[int], logits_V: torch.Tensor) -> torch.Tensor:
            req = SimpleNamespace(origin_input_ids=array("q", prompt), output_ids=array("q", text))
            return processor(logits_V[None].clone(), [NGRAM | {"__req__": req}])[0]

        return rule

    expected = [answer(prompt, rule_for(prompt), target) for prompt in prompts]
    assert expected != [answer(prompt, penalty_rule({}, 0), target) for prompt in prompts]
    fields = {"custom_logit_processor": processor.to_str()}
    for concurrency in (1, 4):
        answers = server.generate_many(
            prompts, concurrency=concurrency, fields=fields, max_new_tokens=MAX_NEW_TOKENS, custom_params=NGRAM
        )
        assert tokens_of(answers) == expected


def test_requests_with_and_without_a_processor_share_batches(serving: Serving, questions: Callable) -> None:
    """A request without a processor joins while another one's processor reads its output so far."""
    server, target, retracts = serving
    if retracts:
        pytest.skip("started without custom processors")
    prompts = questions(8, target, seed=24)
    fields = {"custom_logit_processor": DeepseekOCRNoRepeatNGramLogitProcessor().to_str()}
    read = {"max_new_tokens": MAX_NEW_TOKENS, "custom_params": NGRAM}
    with ThreadPoolExecutor(4) as pool:

        def ask(i: int) -> list[int]:
            more = {"fields": fields, **read} if i % 2 == 0 else {"max_new_tokens": 4 + i}
            return server.generate(prompts[i % 8], **more).token_ids

        mixed = list(pool.map(ask, range(16)))
    assert mixed == [ask(i) for i in range(16)]
