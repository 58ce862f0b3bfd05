"""Every kind of draft that other trainers publish: the target's answers, in the steps of the PyTorch reference.

The drafts are trained by the test (`fixtures/kinds.py`), so most drafts are accepted, and each is stored in its
published layout. A wrong draft changes no answer, so the steps of every request are compared.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.pairs import DENSE, Pair
from tests.fixtures.kinds import KINDS, write_kind
from tests.server.lib.oracle import Expected, Oracle
from tests.server.lib.rehearsals import FA3, FLASHINFER, GRAPHS, PAGES, SM100, TRTLLM_BOTH, TWO_RANKS
from tests.server.lib.variants import TWO_NODES, window

N_PROMPTS, N_NEW = 6, 64
SM90 = (("SGLANG_DFLASH_REHEARSE", "sm90,streams"),)
# Ways to serve a draft: flags, environment, and the draft window.
WAYS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, str], ...], int | None]] = {
    "cpu": ((), (), None),
    "two-ranks": (("--tp-size", "2"), TWO_NODES, None),
    "fa3-graphs": ((*FA3, *GRAPHS), SM90, None),
    "flashinfer-graphs-window": ((*FLASHINFER, *GRAPHS, *window(64)), SM90, 64),
    "fa3-graphs-two-ranks": ((*FA3, *GRAPHS, "--tp-size", "2"), TWO_RANKS, None),
    "trtllm-graphs": ((*TRTLLM_BOTH, *GRAPHS, *PAGES), SM100, None),
}
# Kinds and ways of `make test-ci`. The others run in `make test-full`.
QUICK = {("reduced-anchor-first", "cpu"), ("laguna", "fa3-graphs"), ("mimo", "fa3-graphs")}
# FlashInfer gives all slots of a block the window of the first, so steps of sliding layers may differ.
SLIDING = {name for name, kind in KINDS.items() if "sliding_window" in kind.fields}
SINKS = {name for name, kind in KINDS.items() if "attention_sink_bias" in kind.fields}
ON_TRTLLM = ("sinks", "jetspec", "reduced-anchor-first")


@pytest.fixture(scope="module")
def pairs(questions: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    folder = tmp_path_factory.mktemp("kinds")
    return cache(lambda kind: write_kind(kind, DENSE, questions(N_PROMPTS, "dense", seed=11), folder / kind))


@pytest.fixture(scope="module")
def expected(pairs: Callable[[str], Pair], questions: Callable) -> Callable[..., Expected]:
    @cache
    def expect(kind: str, draft_window: int | None) -> Expected:
        return Oracle(pairs(kind), None, draft_window).expect(questions(N_PROMPTS, "dense", seed=11), N_NEW)

    return expect


def rows() -> list[Any]:
    every = [(kind, way) for way in WAYS for kind in KINDS if runs(kind, way)]
    marks = {row: () if row in QUICK else pytest.mark.full for row in every}
    return [pytest.param(*row, marks=mark, id="-".join(row)) for row, mark in marks.items()]


def runs(kind: str, way: str) -> bool:
    """Return whether the way's attention backend has what the kind needs. The others are refused at launch."""
    if way == "trtllm-graphs":
        return kind in ON_TRTLLM
    return kind not in SINKS or way.startswith("fa3")


@pytest.mark.parametrize(("kind", "way"), rows())
def test_answers_and_steps_are_plain_torchs(
    kind: str, way: str, pool: Any, pairs: Callable[[str], Pair], expected: Callable[..., Expected]
) -> None:
    flags, env, draft_window = WAYS[way]
    wanted = expected(kind, draft_window)
    assert acceptance(wanted) > 2.5, "hardly any draft is accepted, so a wrong draft would not be seen"
    server = pool.get(target=kind, pair=pairs(kind), flags=flags, env=dict(env))
    if kind in SLIDING and "flashinfer" in way:
        require_answers(server, wanted)
        return
    for concurrency in (1, 4):
        wanted.require_from(server, concurrency)
    wanted.require_from(server, 4)  # with a cached prefix
    pool.drop(server)


def acceptance(wanted: Expected) -> float:
    """Return the committed tokens per step."""
    n_steps = sum(sum(steps.values()) for steps in wanted.steps)
    return sum(len(ids) - 1 for ids in wanted.token_ids) / n_steps


def require_answers(server: Server, wanted: Expected) -> None:
    answers = server.generate_many(wanted.prompts, concurrency=4, max_new_tokens=wanted.max_new_tokens)
    assert [answer.token_ids for answer in answers] == wanted.token_ids
