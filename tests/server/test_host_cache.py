"""Hierarchical cache: the draft's K/V are written to host memory and loaded again together with the target's.

Without the draft's K/V answers would still be right, but fewer drafts would be accepted. So steps are compared too.
Without a draft window, a step after a prefix from the host accepts as many drafts as after a full prefill. With a
window, the draft's ring lacks the prefix. Then a step accepts as many drafts as the PyTorch reference does without
this prefix (`n_unseen`).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny.pairs import Arm
from tests.server.conftest import PAIRS
from tests.server.lib.oracle import oracle
from tests.server.lib.talk import LOGPROBS, as_prompt, conversation, require_same_logprobs, steps, tokens_of
from tests.server.lib.variants import TRACK, window

pytestmark = pytest.mark.full

MAX_NEW_TOKENS = 48
PROMPT_LEN = 300
N_PROMPTS = 8  # of 300 tokens: more than fit in the 1536 slots of the device's KV pool
SMALL = ("--max-total-tokens", "1536", "--hicache-ratio", "4", "--hicache-write-policy", "write_through")
ENABLED = ("--enable-hierarchical-cache", "--enable-cache-report", "--hicache-io-backend", "direct", *SMALL)
BY_LAYERS = (*ENABLED, "--hicache-mem-layout", "layer_first")
# The only layout that SGLang's host pool of recurrent states has.
BY_PAGES = (*ENABLED, "--hicache-mem-layout", "page_first_direct")


class Kind(NamedTuple):
    target: str
    flags: tuple[str, ...]
    draft_window: int | None = None


KINDS = {
    "dense": Kind("dense", BY_LAYERS),
    "dense-pages": Kind("dense", (*BY_PAGES, "--page-size", "16")),
    "hybrid": Kind("hybrid", (*BY_PAGES, *TRACK)),
    "dense-window": Kind("dense", (*BY_LAYERS, *window(64)), draft_window=64),
}
# Every prefix of whole pages is fetched from storage, before its request is scheduled.
STORED = (
    *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'),
)


class Serving(NamedTuple):
    server: Server
    kind: Kind
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def serving(request: pytest.FixtureRequest, pool: Any) -> Iterator[Serving]:
    kind: Kind = request.param
    running = pool.get(target=kind.target, flags=kind.flags)
    prompts = [(as_prompt(conversation(n, n_turns=6), kind.target) * 3)[:PROMPT_LEN] for n in range(N_PROMPTS)]
    yield Serving(running, kind, prompts)
    pool.drop(running)


def cold(server: Server, prompt: list[int]) -> Generation:
    server.flush_cache()
    return server.generate(prompt, fields=LOGPROBS, max_new_tokens=MAX_NEW_TOKENS)


def test_steps_after_a_prefix_from_the_host_equal_those_after_a_prefill(serving: Serving, reference: Callable) -> None:
    server, prompts = serving.server, serving.prompts
    uncached = [cold(server, prompt) for prompt in prompts]
    server.flush_cache()
    first = server.generate_many(prompts, concurrency=4, max_new_tokens=MAX_NEW_TOKENS)
    again = [server.generate(prompt, fields=LOGPROBS, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
    from_host = [(answer.meta["cached_tokens_details"] or {}).get("host", 0) for answer in again]
    assert sum(n > PROMPT_LEN // 2 for n in from_host) >= N_PROMPTS // 2, "too few hits on the host"
    expected = [reference(prompt, MAX_NEW_TOKENS, serving.kind.target) for prompt in prompts]
    for answers in (uncached, first, again):
        assert tokens_of(answers) == expected
    for warm, answer in zip(again, uncached, strict=True):
        require_same_logprobs(warm, answer)
    if serving.kind.draft_window is None:
        assert list(map(steps, again)) == list(map(steps, uncached))
        return
    expert = oracle(PAIRS[serving.kind.target], None, serving.kind.draft_window)
    assert list(map(steps, again)) == [
        expert.accepted_histogram(prompt, MAX_NEW_TOKENS, n_unseen=answer.meta["cached_tokens"])
        for prompt, answer in zip(prompts, again, strict=True)
    ]


def test_sglangs_own_worker_takes_the_same_steps(serving: Serving, pool: Any) -> None:
    if serving.kind.draft_window is not None:
        pytest.skip("SGLang's windows are not rings")
    prompts = serving.prompts
    serving.server.flush_cache()
    ours = [serving.server.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts * 2]
    server = pool.get(Arm.STOCK, target=serving.kind.target, flags=serving.kind.flags)
    theirs = [server.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts * 2]
    pool.drop(server)
    assert tokens_of(theirs) == tokens_of(ours)
    assert list(map(steps, theirs)) == list(map(steps, ours))


@pytest.mark.parametrize("name", ["dense-pages", "hybrid", "dense-window"])
def test_a_prefix_from_storage_has_draft_kv(name: str, pool: Any, reference: Callable, tmp_path: Path) -> None:
    """A second server reads what the first has stored in files. With a draft window the draft's K/V are not stored."""
    kind, env = KINDS[name], {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    prompts = [(as_prompt(conversation(n, n_turns=6), kind.target) * 3)[:PROMPT_LEN] for n in range(N_PROMPTS)]
    asked = []
    for _ in range(2):
        server = pool.get(target=kind.target, flags=(*kind.flags, *STORED), env=env)
        asked.append([server.generate(p, fields=LOGPROBS, max_new_tokens=MAX_NEW_TOKENS) for p in prompts])
        assert tokens_of(asked[-1]) == [reference(prompt, MAX_NEW_TOKENS, kind.target) for prompt in prompts]
        pool.drop(server)
    for warm, answer in zip(*reversed(asked), strict=True):
        require_same_logprobs(warm, answer)
    details = [answer.meta["cached_tokens_details"] or {} for answer in asked[1]]
    from_storage = [found.get("storage", 0) for found in details]
    assert sum(n > PROMPT_LEN // 2 for n in from_storage) >= N_PROMPTS // 2, f"too few hits in storage: {from_storage}"
    expected = list(map(steps, asked[0]))
    if kind.draft_window is not None:
        expert = oracle(PAIRS[kind.target], None, kind.draft_window)
        expected = [
            expert.accepted_histogram(prompt, MAX_NEW_TOKENS, n_unseen=answer.meta["cached_tokens"])
            for prompt, answer in zip(prompts, asked[1], strict=True)
        ]
    assert list(map(steps, asked[1])) == expected
