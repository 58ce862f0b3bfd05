"""Exact answers: every server of `VARIANTS` gives Transformers' greedy answer, token for token, in fp32.

The answer must not depend on other requests, on a cached prefix, or on the abort of another request either.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.pairs import Pair
from tests.server.lib.oracle import oracle
from tests.server.lib.pairs import pair_of
from tests.server.lib.rows import require_rows
from tests.server.lib.talk import steps, together, tokens_of
from tests.server.lib.variants import VARIANTS, Variant

N_PROMPTS = 12  # more than run at a time, so that requests begin while others run
MAX_NEW_TOKENS = 80


class Serving(NamedTuple):
    server: Server
    variant: Variant
    pair: Pair
    prompts: list[list[int]]
    expected: list[list[int]]  # Transformers' continuations
    trace: Path  # folder of the width trace; empty unless `variant.traces_widths`


@pytest.fixture(
    scope="module",
    params=[pytest.param(v, id=name, marks=pytest.mark.full if v.full else ()) for name, v in VARIANTS.items()],
)
def serving(
    request: pytest.FixtureRequest,
    pool: Any,
    questions: Callable,
    reference: Callable,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    variant: Variant = request.param
    pair = pair_of(variant, tmp_path_factory.mktemp("draft"))
    prompts = questions(N_PROMPTS, variant.target)
    expected = [reference(prompt, MAX_NEW_TOKENS, variant.target) for prompt in prompts]
    trace, env = tmp_path_factory.mktemp("trace"), dict(variant.env)
    if variant.traces_widths:
        env["SGLANG_DFLASH_WIDTH_TRACE"] = str(trace)
    running = pool.get(target=variant.target, pair=pair, flags=variant.flags, env=env)
    yield Serving(running, variant, pair, prompts, expected, trace)
    if variant is not VARIANTS["hybrid"]:  # other test modules use this variant's server
        pool.drop(running)


@pytest.fixture(autouse=True)
def clean(serving: Serving) -> Iterator[None]:
    """Empty the prefix cache before and after each test. `flush_cache` fails if a request still runs."""
    serving.server.flush_cache()
    yield
    serving.server.flush_cache()


def test_one_at_a_time(serving: Serving) -> None:
    """If the variant `knows_steps`, as many steps must accept n drafts as in the PyTorch reference, for every n."""
    answers = serving.server.generate_many(serving.prompts, concurrency=1, max_new_tokens=MAX_NEW_TOKENS)
    assert tokens_of(answers) == serving.expected
    if serving.variant.knows_steps:
        expert = oracle(serving.pair, serving.variant.block_size, serving.variant.draft_window)
        wanted = [expert.accepted_histogram(prompt, MAX_NEW_TOKENS) for prompt in serving.prompts[:6]]
        assert list(map(steps, answers[:6])) == wanted


def test_drafts_at_changing_widths_are_plain_torchs(serving: Serving) -> None:
    """Compare the accepted drafts of each step with the PyTorch reference.

    A step of one token writes its context K/V late. Enough of the compared steps must follow such a step.
    """
    if not serving.variant.traces_widths:
        pytest.skip("here every step verifies the whole block, or is not written down")
    expert = oracle(serving.pair, serving.variant.block_size, serving.variant.draft_window)
    rounds = 3  # one round would have too few steps with drafts after a step of one token
    each = (one for one in zip(serving.prompts, serving.expected, strict=True) for _ in range(rounds))
    asked = {f"traced-{n}": one for n, one in enumerate(each)}
    predicted = {rid: expert.accepted_at(*one) for rid, one in asked.items()}

    options = [{"fields": {"rid": rid}, "max_new_tokens": MAX_NEW_TOKENS} for rid in asked]
    together(serving.server, [(prompt, given) for (prompt, _), given in zip(asked.values(), options, strict=True)])
    (file,) = serving.trace.iterdir()
    position, width_before, compared = Counter[str](), dict[str, int](), Counter[bool]()
    for line in map(json.loads, file.read_text().splitlines()):
        width = line["width"]
        for rid in line["accepted"].keys() & asked.keys():
            n_accepted, at = line["accepted"][rid], position[rid]
            if width > 1 and at + width <= len(predicted[rid]):  # the known answer covers all verified positions
                assert n_accepted == min(predicted[rid][at], width - 1), (rid, at, width)
                compared[width_before.get(rid) == 1] += 1
            position[rid] += n_accepted + 1
            width_before[rid] = width
    assert compared[False] > 20
    assert compared[True] > 20 or "auto" in dict(serving.variant.env).values(), "hardly any draft after a step of one"


def test_eight_at_a_time_in_any_order(serving: Serving) -> None:
    order = Random(1).sample(range(N_PROMPTS), N_PROMPTS)
    prompts = [serving.prompts[i] for i in order]
    answers = serving.server.generate_many(prompts, concurrency=8, max_new_tokens=MAX_NEW_TOKENS)
    assert tokens_of(answers) == [serving.expected[i] for i in order]


def test_hidden_states_of_every_token(serving: Serving) -> None:
    """Requests for hidden states share a batch with requests without them. A server without the flag refuses."""
    fields = {"return_hidden_states": True}
    if "--enable-return-hidden-states" not in serving.variant.flags:
        with pytest.raises(ServerError, match=r"answered 400: .*--enable-return-hidden-states"):
            serving.server.generate(serving.prompts[0], fields=fields, max_new_tokens=1)
        return
    options = [{"fields": fields if i % 3 else {}, "max_new_tokens": MAX_NEW_TOKENS} for i in range(N_PROMPTS)]
    answers = together(serving.server, list(zip(serving.prompts, options, strict=True)))
    assert tokens_of(answers) == serving.expected
    for i, (prompt, answer) in enumerate(zip(serving.prompts, answers, strict=True)):
        if i % 3:
            require_rows(serving.pair.target, prompt, answer)
    assert not any("hidden_states" in answer.meta for answer in answers[::3])


def test_prefix_inside_an_answer_is_continued(serving: Serving) -> None:
    """Send the prompt with a part of its answer; the cached prefix then includes generated tokens."""
    server, random = serving.server, Random(2)
    for prompt, expected in zip(serving.prompts[:4], serving.expected[:4], strict=True):
        server.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)
        for cut in random.sample(range(1, len(expected)), min(4, len(expected) - 1)):
            rest = server.generate(prompt + expected[:cut], max_new_tokens=MAX_NEW_TOKENS - cut)
            assert rest.token_ids == expected[cut:], f"cut at {cut} of {len(expected)}"


def test_long_conversation_resumes_from_the_cache(serving: Serving, questions: Callable, reference: Callable) -> None:
    """A hybrid target resumes from a recurrent state saved at a multiple of the track interval (64), inside a block.

    Prompt and answer have 216 tokens, because of lazy tracking (`extra_buffer_lazy`). SGLang then drops the state saved
    at 192 if the request ends less than a block after 192, or less than two blocks before 256: a step in flight may
    overwrite it.
    """
    target = serving.variant.target
    long_prompt = [token for prompt in questions(6, target, seed=5) for token in prompt][:148]
    expected = reference(long_prompt, 68, target)
    assert len(expected) == 68
    assert serving.server.generate(long_prompt, max_new_tokens=68).token_ids == expected
    longer = long_prompt + expected
    again = serving.server.generate(longer, max_new_tokens=32)
    assert again.token_ids == reference(longer, 32, target)
    if serving.variant.caches_inside_text:
        assert again.meta["cached_tokens"] > len(long_prompt), again.meta


def test_window_fills_up_again_after_a_hit(serving: Serving, questions: Callable) -> None:
    """Steps after a cache hit must equal those of the PyTorch reference.

    A windowed draft's ring lacks the cached prefix. Without a window the draft's K/V are cached with the target's.
    """
    variant = serving.variant
    if not variant.knows_steps:
        pytest.skip("the oracle cannot know how steps go here, see variants.py")
    expert = oracle(serving.pair, variant.block_size, variant.draft_window)
    text = [token for prompt in questions(8, variant.target, seed=6) for token in prompt][:300]
    for n_first, n_second in ((150, 151), (150, 180), (210, 300)):
        serving.server.flush_cache()
        serving.server.generate(text[:n_first], max_new_tokens=8)
        answer = serving.server.generate(text[:n_second], max_new_tokens=64)
        n_found = answer.meta["cached_tokens"]
        assert n_found > 64 or not variant.caches_inside_text
        n_unseen = n_found if variant.draft_window else 0
        assert steps(answer) == expert.accepted_histogram(text[:n_second], 64, n_unseen)


def test_aborts_of_neighbours_change_nothing(serving: Serving) -> None:
    leavers = [
        threading.Thread(target=hang_up_after, args=(delay, serving.server, prompt))
        for prompt, delay in zip(serving.prompts[8:12], (0.02, 0.05, 0.1, 0.2), strict=True)
    ]
    for leaver in leavers:
        leaver.start()
        time.sleep(0.01)
    answers = serving.server.generate_many(serving.prompts[:8], concurrency=4, max_new_tokens=MAX_NEW_TOKENS)
    for leaver in leavers:
        leaver.join()
    assert tokens_of(answers) == serving.expected[:8]


def hang_up_after(delay_s: float, server: Server, prompt: list[int]) -> None:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True},
    }
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(f"{server.url}/generate", json=body, timeout=delay_s)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17])
def test_a_limit_inside_a_block_is_kept(serving: Serving, n: int) -> None:
    assert serving.server.generate(serving.prompts[0], max_new_tokens=n).token_ids == serving.expected[0][:n]
