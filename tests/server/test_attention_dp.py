"""Attention data parallelism: two ranks that serve their own requests answer like one rank, in as many steps.

With one request, one rank is idle. A rank may also have a prompt to prefill while the other has requests to decode.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.pairs import Arm
from tests.server.lib.oracle import Expected
from tests.server.lib.rehearsals import FA3, GRAPHS, SM90
from tests.server.lib.variants import TWO_NODES

FLAGS = ("--tp", "2", "--dp", "2", "--enable-dp-attention", "--enable-dp-lm-head")
N_PROMPTS, MAX_NEW_TOKENS = 6, 48

pytestmark = pytest.mark.full


class Kind(NamedTuple):
    target: str = "hybrid"
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    arm: Arm = Arm.PLUGIN
    draft_window: int | None = None


KINDS = {
    "hybrid": Kind(),
    "dense": Kind("dense"),
    "window": Kind(flags=("--speculative-draft-window-size", "64"), draft_window=64),
    "stock": Kind("dense", arm=Arm.STOCK),
    "fa3-graphs": Kind("dense", (*FA3, *GRAPHS), SM90),
    "fa3-graphs-hybrid": Kind(flags=(*FA3, *GRAPHS), env=SM90),
}


class Serving(NamedTuple):
    server: Server
    expected: Expected


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def serving(request: pytest.FixtureRequest, pool: Any, plain_torch: Callable[..., Expected]) -> Iterator[Serving]:
    kind: Kind = request.param
    running = pool.get(kind.arm, target=kind.target, flags=(*FLAGS, *kind.flags), env=dict(TWO_NODES + kind.env))
    yield Serving(running, plain_torch(N_PROMPTS, MAX_NEW_TOKENS, kind.target, kind.draft_window))
    pool.drop(running)


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_answers_and_steps_are_plain_torchs(serving: Serving, concurrency: int) -> None:
    serving.server.flush_cache()
    answers = serving.expected.require_from(serving.server, concurrency)
    assert len({answer.meta["dp_rank"] for answer in answers}) == 2
