"""Requests that are aborted, stopped, refused or retracted, and servers that pause, update weights or restart.

All other requests must give Transformers' tokens. An affected request must give the first tokens of its answer.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny.pairs import HYBRID
from tests.server.lib.talk import as_prompt, as_text, conversation, post, push, steps, stream, together, tokens_of
from tests.server.lib.variants import TRACK

MAX_NEW_TOKENS = 80
PATIENCE_S = 120.0  # longest wait for progress of a server
# SGLang reserves KV slots for all `max_new_tokens` of a request that ignores the end token. Eight such requests fit at
# once.
ENDLESS = {"max_new_tokens": 600, "ignore_eos": True}
CONTEXT = 256
END = 2
# KV slots for three requests of the context length (eight are sent), and a scheduler that admits more than fit.
TIGHT_FLAGS = f"--context-length {CONTEXT} --max-total-tokens 896 --schedule-conservativeness 0.05"
TIGHT = (*TRACK, *TIGHT_FLAGS.split())
KV_FULL = "KV cache pool is full. Retract requests"


@pytest.fixture(scope="module")
def prompts(questions: Callable) -> list[list[int]]:
    return questions(12, seed=40)


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], reference: Callable) -> list[list[int]]:
    return [reference(prompt, MAX_NEW_TOKENS) for prompt in prompts]


@pytest.fixture
def steady(ours: Server, prompts: list[list[int]], expected: list[list[int]]) -> Iterator[None]:
    """Send the first four questions repeatedly while a test runs. Every answer must be the expected one."""
    over = threading.Event()

    def ask(i: int) -> int:
        n = 0
        while not over.is_set():
            assert ours.generate(prompts[i], max_new_tokens=MAX_NEW_TOKENS).token_ids == expected[i]
            n += 1
        return n

    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(ask, i) for i in range(4)]
        try:
            yield
        finally:
            over.set()
        assert all(client.result() for client in asked)
    ours.flush_cache()


def submit(clients: ThreadPoolExecutor, server: Server, prompts: Sequence[list[int]], **options: Any) -> list[Future]:
    return [clients.submit(server.generate, prompt, **options) for prompt in prompts]


class Streams:
    """Streamed requests in flight: a test acts on their progress, not on elapsed time.

    Leaving the `with` block waits until all requests have ended.
    """

    def __init__(self, server: Server, prompts: Sequence[list[int]], **options: Any) -> None:
        self.server, self.options = server, options
        self.begun = threading.Semaphore(0)
        self.arrived: list[Generation] = []  # chunks of all requests, in order of arrival
        self.clients = ThreadPoolExecutor(len(prompts))
        self.asked = [self.clients.submit(self._ask, prompt) for prompt in prompts]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.clients.shutdown()

    def _ask(self, prompt: list[int]) -> Generation:
        mine = []
        for chunk in stream(self.server, prompt, **self.options):
            mine.append(chunk)
            self.arrived.append(chunk)
            if len(mine) == 1:
                self.begun.release()
        return mine[-1]

    def wait_begun(self, n: int) -> None:
        """Wait until `n` requests have returned their first chunk; call this once."""
        for _ in range(n):
            assert self.begun.acquire(timeout=PATIENCE_S), "no first chunk"

    def wait_quiet(self) -> None:
        """Wait until no chunk arrives for one second.

        If the server has not paused, this returns only after all requests have ended.
        """
        n_arrived, deadline = -1, time.monotonic() + PATIENCE_S
        while len(self.arrived) != n_arrived:
            assert time.monotonic() < deadline, "the server did not pause"
            n_arrived = len(self.arrived)
            time.sleep(1.0)

    @property
    def n_ended(self) -> int:
        return sum(future.done() for future in self.asked)

    def answers(self) -> list[Generation]:
        return [future.result() for future in self.asked]


# -- early ends ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("steady")
def test_aborted_request_returns_its_tokens_so_far(ours: Server, prompts: list[list[int]], reference: Callable) -> None:
    """Abort a stream after a random number of tokens: the tokens received must be the first ones of its answer."""
    random, kinds = Random(0), set()
    for i in range(8):
        prompt = prompts[4 + i]
        rid, leave_at = f"leaver-{i}", random.randrange(1, 40)
        for chunk in stream(ours, prompt, fields={"rid": rid}, **ENDLESS):
            seen = chunk.token_ids
            reason = chunk.meta["finish_reason"]
            if reason is None and len(seen) >= leave_at:
                assert post(ours, "/abort_request", {"rid": rid}).status_code == 200
                leave_at = 10**9
        kinds.add(reason["type"])
        known = reference(prompt, 120)  # up to the end token, which the stream ignores
        assert seen[: len(known)] == known[: len(seen)]
    assert "abort" in kinds, "nothing was aborted in time"


def endless_ends(asked: Streams) -> set[str]:
    """Return the finish reasons of `ENDLESS` answers: "abort", or "length" if the abort came too late."""
    ended = {(answer.meta["finish_reason"]["type"], len(answer.token_ids)) for answer in asked.answers()}
    assert all(kind == "abort" or (kind, n) == ("length", ENDLESS["max_new_tokens"]) for kind, n in ended), ended
    return {kind for kind, _ in ended}


def test_abort_all_leaves_a_server_that_answers(
    ours: Server, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Abort twelve requests: eight are running and four are queued."""

    def abort_midway() -> bool:
        with Streams(ours, prompts[:8], **ENDLESS) as running, ThreadPoolExecutor(4) as clients:
            running.wait_begun(8)
            queued = submit(clients, ours, prompts[8:], **ENDLESS)
            while not all(future.done() for future in (*running.asked, *queued)):  # a request may arrive after an abort
                assert post(ours, "/abort_request", {"abort_all": True}).status_code == 200
                time.sleep(0.05)
            return "abort" in endless_ends(running)

    in_time(abort_midway)
    assert tokens_of(ours.generate_many(prompts, concurrency=8, max_new_tokens=MAX_NEW_TOKENS)) == expected


def test_a_stop_string_inside_a_block(ours: Server, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """The text ends at the stop string, streamed or not, although the block has tokens after it."""
    random = Random(2)
    for prompt, tokens in zip(prompts, expected, strict=True):
        text = as_text(tokens)
        start = random.randrange(len(text) // 4, len(text) // 2)
        stop = text[start : start + random.randrange(2, 6)]
        answer = ours.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, stop=stop)
        assert answer.meta["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer.text == text[: text.index(stop)]
        assert answer.token_ids == tokens[: len(answer.token_ids)]
        assert stop in as_text(answer.token_ids)
        assert stop not in as_text(answer.token_ids[:-1]), "tokens past the stop"
        *_, last = stream(ours, prompt, max_new_tokens=MAX_NEW_TOKENS, stop=stop)
        assert last.text == answer.text


# -- limits of memory ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tight(server: Callable) -> Server:
    return server(flags=TIGHT)


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    """Return prompts at least as long as the context; tests use their last tokens."""
    return [as_prompt(conversation(seed, n_turns=7)) for seed in range(300, 308)]


@pytest.mark.full
@pytest.mark.parametrize("n", [5, 6, 15, 16, 17, 18, 33])
def test_context_limit_changes_no_tokens_of_others(
    tight: Server, long_prompts: list[list[int]], reference: Callable, n: int
) -> None:
    """A block at the context limit extends past its row of the request table; the next row must not be overwritten."""
    at_limit = [prompt[-(CONTEXT - 2 - n) :] for prompt in long_prompts[:2]]
    neighbours = [prompt[-60:] for prompt in long_prompts[2:5]]
    for order in ([*at_limit, *neighbours], [*neighbours, *at_limit]):
        tight.flush_cache()
        limits = [n if prompt in at_limit else MAX_NEW_TOKENS for prompt in order]
        expected = [reference(prompt, limit) for prompt, limit in zip(order, limits, strict=True)]
        asked = [(prompt, {"max_new_tokens": limit}) for prompt, limit in zip(order, limits, strict=True)]
        assert tokens_of(together(tight, asked)) == expected


@pytest.mark.full
def test_context_limit_ends_an_answer(tight: Server, long_prompts: list[list[int]]) -> None:
    """SGLang ends an answer when prompt and answer together have two tokens less than the context length."""
    for n_prompt in (CONTEXT - 7, CONTEXT - 8, CONTEXT - 20, CONTEXT - 40):
        answer = tight.generate(long_prompts[0][-n_prompt:], max_new_tokens=CONTEXT - n_prompt, ignore_eos=True)
        assert answer.meta["finish_reason"]["type"] == "length"
        assert n_prompt + len(answer.token_ids) == CONTEXT - 2


@pytest.mark.full
def test_requests_that_do_not_fit_are_refused(
    tight: Server, long_prompts: list[list[int]], reference: Callable
) -> None:
    fits = long_prompts[0][-100:]
    for n_prompt, n_new in ((CONTEXT, 1), (CONTEXT - 6, 1), (CONTEXT + 100, 1), (100, CONTEXT)):
        body = {"input_ids": long_prompts[1][-n_prompt:], "sampling_params": {"max_new_tokens": n_new}}
        refused = post(tight, "/generate", body)
        assert refused.status_code == 400, refused.text
        assert str(CONTEXT) in refused.text or "maximum allowed length" in refused.text
    assert tight.generate(fits, max_new_tokens=32).token_ids == reference(fits, 32)


@pytest.mark.full
def test_retracted_requests_give_the_same_tokens(
    tight: Server, server: Callable, long_prompts: list[list[int]]
) -> None:
    """Eight requests of 230 tokens do not fit a pool of 896, so some are retracted and start again.

    A bias bans the end token. With `ignore_eos` instead, SGLang would reserve all KV slots at admission.
    """
    prompts = [prompt[-80:] for prompt in long_prompts]
    endless = {"max_new_tokens": 150, "logit_bias": {str(END): -100.0}}
    expected = [answer.token_ids for answer in server("off").generate_many(prompts, concurrency=8, **endless)]
    before = tight.log_text().count(KV_FULL)
    for _ in range(3):
        tight.flush_cache()
        assert tokens_of(tight.generate_many(prompts, concurrency=8, **endless)) == expected
    assert tight.log_text().count(KV_FULL) > before, "memory sufficed; this test cannot fail"


# -- changes while requests run ------------------------------------------------------------------------------------


def test_flush_cache_idle_and_busy(ours: Server, prompts: list[list[int]], expected: list[list[int]]) -> None:
    def flush_midway() -> bool:
        with ThreadPoolExecutor(8) as clients:
            asked = submit(clients, ours, prompts, max_new_tokens=MAX_NEW_TOKENS)
            statuses = []
            while not all(future.done() for future in asked):
                statuses.append(post(ours, "/flush_cache").status_code)
                time.sleep(0.05)
            assert [future.result().token_ids for future in asked] == expected
        return 400 in statuses

    in_time(flush_midway)
    for prompt, tokens in zip(prompts[:4], expected[:4], strict=True):
        ours.flush_cache()
        answer = ours.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)
        assert answer.meta["cached_tokens"] == 0
        assert answer.token_ids == tokens


@contextmanager
def paused(server: Server, mode: str) -> Iterator[None]:
    assert post(server, "/pause_generation", {"mode": mode}).status_code == 200
    try:
        yield
    finally:
        assert post(server, "/continue_generation").status_code == 200


def in_time(attempt: Callable[[], bool]) -> None:
    """Call `attempt` until it returns True, at most five times.

    `attempt` returns False if it acted after all requests had ended. This may happen on a busy machine.
    """
    assert any(attempt() for _ in range(5)), "too late five times"


@pytest.mark.parametrize("n_begun", [1, 5, 9])  # of twelve requests; eight run at a time
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(
    ours: Server, prompts: list[list[int]], expected: list[list[int]], mode: str, n_begun: int
) -> None:
    """Requests paused in the middle, with K/V kept ("in_place") or dropped ("retract"), give the same tokens."""

    def pause_midway() -> bool:
        ours.flush_cache()
        with Streams(ours, prompts, max_new_tokens=MAX_NEW_TOKENS) as asked:
            asked.wait_begun(n_begun)
            with paused(ours, mode):
                asked.wait_quiet()
                midway = asked.n_ended < len(prompts)
            assert tokens_of(asked.answers()) == expected
        return midway

    in_time(pause_midway)


def test_pause_by_abort(ours: Server, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Pause after all requests have begun. A request arriving during the pause would wait until the pause is over."""

    def abort_midway() -> bool:
        with Streams(ours, prompts[:8], **ENDLESS) as asked:
            asked.wait_begun(8)
            with paused(ours, "abort"):
                return endless_ends(asked) == {"abort"}

    in_time(abort_midway)
    assert ours.generate(prompts[0], max_new_tokens=MAX_NEW_TOKENS).token_ids == expected[0]


@pytest.mark.parametrize("mode", ["in_place", pytest.param("retract", marks=pytest.mark.full)])
def test_draft_update_in_the_middle_of_requests(
    whole: Server, prompts: list[list[int]], expected: list[list[int]], mode: str
) -> None:
    original = {name: tensor.float() for name, tensor in load_file(HYBRID.draft / "model.safetensors").items()}
    torch.manual_seed(0)
    useless = {name: torch.randn_like(tensor) * tensor.std() for name, tensor in original.items() if tensor.ndim == 2}

    def ask_across(tensors: dict[str, torch.Tensor]) -> list[Generation]:
        with Streams(whole, prompts, max_new_tokens=MAX_NEW_TOKENS) as asked:
            asked.wait_begun(5)
            with paused(whole, mode):
                assert push(whole, tensors, selector="draft", flush_cache=False).status_code == 200
            return asked.answers()

    def quiet_steps() -> list[dict[int, int]]:
        whole.flush_cache()
        answers = whole.generate_many(prompts, concurrency=1, max_new_tokens=MAX_NEW_TOKENS)
        assert tokens_of(answers) == expected
        return [steps(answer) for answer in answers]

    before = quiet_steps()
    try:
        assert tokens_of(ask_across(useless)) == expected
        worse = quiet_steps()
    finally:
        across_back = ask_across({name: original[name] for name in useless})
    assert tokens_of(across_back) == expected
    n_worse, n_before = (sum(sum(counts.values()) for counts in answers) for answers in (worse, before))
    assert n_worse > 2 * n_before, "the draft did not change"
    assert quiet_steps() == before


@pytest.mark.full
def test_a_restarted_server_gives_the_same_answers_and_steps(
    tight: Server, prompts: list[list[int]], reference: Callable
) -> None:
    """Stop and start the server while requests run, as a deployment does."""

    def ask() -> list[tuple[list[int], dict[int, int]]]:
        tight.flush_cache()
        answers = tight.generate_many(prompts, concurrency=1, max_new_tokens=60)
        return [(answer.token_ids, steps(answer)) for answer in answers]

    before = ask()
    assert [tokens for tokens, _ in before] == [reference(prompt, 60) for prompt in prompts]
    with Streams(tight, prompts[:8], max_new_tokens=150, ignore_eos=True) as running:
        running.wait_begun(3)
        tight.stop()
        assert any(future.exception() for future in running.asked)
    tight.start()
    tight.wait_ready()
    assert ask() == before
