"""Prefix cache: a cached prefix changes no token, and steps are as predicted below. No text of other requests leaks.

Without a draft window the draft's context K/V are in the target's KV slots. So they are cached with the prefix, and a
step after a cache hit accepts as many drafts as after a full prefill. With a window they are in a ring per request,
which lacks the cached prefix. Then a step accepts as many drafts as the PyTorch reference does without this prefix
(`n_unseen`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import NamedTuple

import pytest

from sglang_dflash.pairs.servers.server import Generation, Server
from tests.server.conftest import PAIRS
from tests.server.lib.oracle import oracle
from tests.server.lib.talk import (
    LOGPROBS,
    as_prompt,
    as_text,
    conversation,
    require_same_logprobs,
    steps,
    stream,
    together,
    tokens_of,
)
from tests.server.lib.variants import VARIANTS, Variant

MAX_NEW_TOKENS = 64
SERVED = {
    "hybrid": (),
    **dict.fromkeys(
        (
            "dense",
            "hybrid-pages-chunked",
            "hybrid-window",
            "hybrid-snapshot",
            "dense-window",
            "hybrid-no-buffer-sync-chunked",
        ),
        pytest.mark.full,
    ),
}


class Serving(NamedTuple):
    server: Server
    variant: Variant
    reference: Callable[..., list[int]]

    @property
    def target(self) -> str:
        return self.variant.target

    def expected(self, prompt: Sequence[int], n: int = MAX_NEW_TOKENS) -> list[int]:
        return self.reference(prompt, n, self.target)

    def steps_after(self, prompt: Sequence[int], hit: Generation, cold: Generation) -> dict[int, int]:
        """Return the expected steps of `hit`; `cold` is the answer to the same prompt after a full prefill."""
        window = self.variant.draft_window
        if window is None:
            return steps(cold)
        expert = oracle(PAIRS[self.target], self.variant.block_size, window)
        return expert.accepted_histogram(prompt, MAX_NEW_TOKENS, n_unseen=hit.meta["cached_tokens"])


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks) for name, marks in SERVED.items()])
def serving(request: pytest.FixtureRequest, server: Callable, reference: Callable) -> Serving:
    variant = VARIANTS[request.param]
    return Serving(server(target=variant.target, flags=variant.flags, env=dict(variant.env)), variant, reference)


@pytest.fixture(autouse=True)
def empty_cache(serving: Serving) -> None:
    serving.server.flush_cache()


@pytest.mark.parametrize("seed", range(2))
def test_a_hit_gives_the_tokens_and_the_steps_of_a_full_prefill(serving: Serving, seed: int) -> None:
    """Cached prefixes end inside the prompt, at its end, and inside generated text."""
    server = serving.server
    prompt = as_prompt(conversation(seed, n_turns=4), serving.target)
    answer = serving.expected(prompt)
    whole, n_hits = prompt + answer, 0
    cuts = [*Random(seed).sample(range(len(prompt) // 2, len(whole)), 5), len(prompt)]
    for cut in cuts:
        server.flush_cache()
        cold = server.generate(whole[:cut], fields=LOGPROBS, max_new_tokens=MAX_NEW_TOKENS)
        server.flush_cache()
        server.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)
        warm = server.generate(whole[:cut], fields=LOGPROBS, max_new_tokens=MAX_NEW_TOKENS)
        warmer = server.generate(whole[:cut], fields=LOGPROBS, max_new_tokens=MAX_NEW_TOKENS)
        assert cold.meta["cached_tokens"] == 0
        assert cold.token_ids == warm.token_ids == warmer.token_ids == serving.expected(whole[:cut])
        for hit in (warm, warmer):
            require_same_logprobs(hit, cold)
            expected = serving.steps_after(whole[:cut], hit, cold)
            assert steps(hit) == expected, f"cut at {cut} of {len(prompt)} + {len(answer)}"
        n_hits += (warm.meta["cached_tokens"] > 0) + (warmer.meta["cached_tokens"] > 0)
    assert n_hits >= len(cuts), "too few hits; this test cannot fail"


@pytest.mark.parametrize("seed", range(40, 42))
def test_context_of_decode_steps_equals_that_of_a_prefill(serving: Serving, seed: int) -> None:
    server, history, beyond_prompt = serving.server, as_prompt(conversation(seed, n_turns=1), serving.target), 0
    turns = []
    for turn in range(4):
        warm = server.generate(history, fields=LOGPROBS, max_new_tokens=MAX_NEW_TOKENS)
        assert warm.token_ids == serving.expected(history), f"turn {turn}"
        beyond_prompt += warm.meta["cached_tokens"] > len(turns[0][0]) if turns else 0
        turns.append((history, warm))
        history = history + warm.token_ids + as_prompt(conversation(100 * seed + turn, n_turns=1), serving.target)
    for turn, (history, warm) in enumerate(turns):
        server.flush_cache()
        cold = server.generate(history, fields=LOGPROBS, max_new_tokens=MAX_NEW_TOKENS)
        assert cold.token_ids == warm.token_ids, f"turn {turn}"
        require_same_logprobs(warm, cold)
        assert steps(warm) == serving.steps_after(history, warm, cold), f"turn {turn}"
    assert beyond_prompt >= 2, "too few hits inside generated text; this test cannot fail"


def test_extended_prompt_hits_the_prefix_of_a_running_request(serving: Serving) -> None:
    """The second request continues prompt and answer of the first, while the first still decodes."""
    first = as_prompt(conversation(10, n_turns=4), serving.target)
    second = first + serving.expected(first)[:20] + as_prompt(conversation(11, n_turns=1), serving.target)
    running = stream(serving.server, first, max_new_tokens=MAX_NEW_TOKENS)
    next(running)
    extended = serving.server.generate(second, max_new_tokens=MAX_NEW_TOKENS)
    *_, last = running
    assert last.token_ids == serving.expected(first)
    assert extended.token_ids == serving.expected(second)


def test_conversations_over_the_openai_api(serving: Serving) -> None:
    """Run four concurrent conversations of five turns. Every turn sends the whole history with the server's answers."""
    client = serving.server.openai()

    def converse(seed: int) -> int:
        history = []
        for turn in range(5):
            history += conversation(100 * seed + turn, n_turns=1)
            answer = client.chat.completions.create(
                model="tiny", messages=history, temperature=0, max_tokens=MAX_NEW_TOKENS
            )
            text = answer.choices[0].message.content
            assert text == as_text(serving.expected(as_prompt(history, serving.target)), serving.target), f"turn {turn}"
            history.append({"role": "assistant", "content": text})
        return len(history)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(converse, range(1, 5))) == [10] * 4


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_requests_that_share_a_prefix_and_diverge(serving: Serving, warm: bool) -> None:
    """Send sixteen requests with a common prefix: twelve different questions follow it, four of them twice.

    If `warm`, the prefix is cached before.
    """
    common = conversation(20, n_turns=3)[:-1]  # ends with an answer
    prompts = [as_prompt([*common, *conversation(30 + i % 12, n_turns=1)], serving.target) for i in range(16)]
    expected = [serving.expected(prompt) for prompt in prompts]
    if warm:
        serving.server.generate(as_prompt(common, serving.target), max_new_tokens=1)
    answers = serving.server.generate_many(prompts, concurrency=16, max_new_tokens=MAX_NEW_TOKENS)
    assert tokens_of(answers) == expected
    if warm:
        assert sum(answer.meta["cached_tokens"] > 0 for answer in answers) >= len(answers) // 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_request_keeps_its_own_grammar(serving: Serving, temperature: float) -> None:
    markers = [f"m{i:02d}" for i in range(100, 124)]
    prompts = [as_prompt(conversation(200 + i % 6, n_turns=1), serving.target) for i in range(len(markers))]
    options = [
        {"regex": f"{marker}( [a-z]{{1,8}}){{3}} {marker}", "temperature": temperature, "max_new_tokens": 60}
        for marker in markers
    ]
    answers = together(serving.server, list(zip(prompts, options, strict=True)), n=len(prompts))
    for marker, answer in zip(markers, answers, strict=True):
        assert {other for other in markers if other in answer.text} == {marker}, answer.text
        assert answer.text.startswith(marker)
        assert answer.text.endswith(marker)
