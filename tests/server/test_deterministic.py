"""`--enable-deterministic-inference`: a seeded request gets the same answer alone, among others, and after a restart.

The server has default variables otherwise: without the flag its verify widths would follow measured times.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_dflash.pairs.servers.server import Generation, Server
from tests.server.conftest import AS_USERS
from tests.server.lib.rehearsals import FA3, GRAPHS
from tests.server.lib.talk import logprobs_of
from tests.server.lib.variants import VARIANTS
from tests.tools.parameters import SEEDED_ENV, SEEDED_FLAGS

N_REQUESTS, MAX_NEW_TOKENS = 8, 48
DRAWN = {"temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS}
REHEARSED = (("SGLANG_DFLASH_REHEARSE", "sm90"),)
WAYS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "dense": ("dense", VARIANTS["dense"].flags, SEEDED_ENV),
    "hybrid": ("hybrid", VARIANTS["hybrid"].flags, SEEDED_ENV),
    "fa3-graphs": ("hybrid", (*FA3, *GRAPHS), SEEDED_ENV | dict(REHEARSED)),
}


def outcome(answer: Generation) -> tuple[list[int], list[float]]:
    """Return the tokens and their logprobs."""
    return answer.token_ids, logprobs_of(answer)


def ask(server: Server, prompts: list[list[int]], concurrency: int) -> list[tuple[list[int], list[float]]]:
    server.flush_cache()
    with ThreadPoolExecutor(max_workers=concurrency) as threads:
        answers = threads.map(
            lambda seed: server.generate(prompts[seed], fields={"return_logprob": True}, sampling_seed=seed, **DRAWN),
            range(len(prompts)),
        )
        return [outcome(answer) for answer in answers]


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_equal_alone_among_others_and_after_a_restart(way: str, pool: Any, questions: Callable) -> None:
    """Tokens are equal; logprobs to 1e-4, because PyTorch's products on a CPU round by the shape."""
    target, flags, env = WAYS[way]
    prompts, asked = questions(N_REQUESTS, target, seed=21), []
    for _ in range(2):
        server = pool.get(target=target, flags=(*SEEDED_FLAGS, *flags), env=AS_USERS | env)
        asked += [ask(server, prompts, 1), ask(server, prompts, N_REQUESTS)]
        state = server.server_info()["internal_states"][0]["dflash"]
        assert set(state["width"]["n_steps"]) == {str(state["block_size"])}
        pool.drop(server)
    (first, *others) = asked
    assert len({tuple(ids) for ids, _ in first}) > N_REQUESTS // 2, "hardly anything was drawn"
    for other in others:
        for (ids, logprobs), (wanted_ids, wanted) in zip(other, first, strict=True):
            assert ids == wanted_ids
            assert logprobs == pytest.approx(wanted, abs=1e-4)
