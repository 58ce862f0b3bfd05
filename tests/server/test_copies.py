"""Blocks extended by n-gram copies: answers equal the target's, steps those of the PyTorch reference with copies."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from sglang_dflash.pairs.servers.server import Generation, Server
from tests.server.conftest import PAIRS
from tests.server.lib.oracle import oracle
from tests.server.lib.rehearsals import FA3, GRAPHS, INTERPRETED, SM90, STREAMS, TRTLLM
from tests.server.lib.talk import as_prompt, as_text, conversation, steps, tokens_of
from tests.server.lib.variants import CHUNKED, PAGES, TRACK, TWO_NODES, window
from tests.tools.parameters import SEEDED_ENV, SEEDED_FLAGS

N_ASKED, MAX_NEW_TOKENS = 8, 96
COPY = (("SGLANG_DFLASH_COPY", "on"),)
WIDE = (("SGLANG_DFLASH_WIDTHS", "32"),)  # tokens; twice the block of either tiny pair


class Kind(NamedTuple):
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    target: str = "hybrid"
    draft_window: int | None = None
    page_size: int = 1
    full: bool = True
    knows_steps: bool = True  # False: the width varies, so steps are not compared with the PyTorch reference
    width: int | None = None  # verify width in tokens; None: the block size


KINDS = {
    "hybrid": Kind(TRACK, full=False),
    "dense": Kind(target="dense", full=False),
    "hybrid-wide": Kind((*TRACK, *CHUNKED), WIDE, width=32),
    "hybrid-wide-window-pages": Kind((*TRACK, *window(64), *PAGES), WIDE, draft_window=64, page_size=16, width=32),
    "hybrid-wide-snapshots": Kind(TRACK, (*WIDE, ("SGLANG_DFLASH_GDN_STATE", "snapshot")), width=32),
    "dense-wide": Kind(("--disable-overlap-schedule",), WIDE, target="dense", width=32),
    "hybrid-wide-widths": Kind(TRACK, (("SGLANG_DFLASH_WIDTHS", "1,4,8,16,24,32"),), knows_steps=False),
    "hybrid-two-ranks": Kind(TRACK, TWO_NODES),
    "fa3-graphs-wide-kernels": Kind((*FA3, *GRAPHS, *TRACK), (*INTERPRETED, *WIDE), width=32),
    "fa3-graphs-wide-streams": Kind((*FA3, *GRAPHS, *TRACK), (*STREAMS, *WIDE), width=32),
    "trtllm-graphs-dense": Kind((*TRTLLM, *GRAPHS, "--page-size", "16"), SM90, "dense", page_size=16),
}


class Serving(NamedTuple):
    server: Server
    kind: Kind
    prompts: list[list[int]]
    expected: list[list[int]]  # Transformers' continuations

    def generate(self, concurrency: int, **sampling: Any) -> list[Generation]:
        return self.server.generate_many(
            self.prompts, concurrency=concurrency, max_new_tokens=MAX_NEW_TOKENS, **sampling
        )


def asked_again(target: str, reference: Callable) -> list[list[int]]:
    """Return conversations of two questions. In every other conversation the second question repeats the first."""
    prompts = []
    for seed in range(N_ASKED):
        question, *_ = conversation(seed, 1)
        answer = reference(as_prompt([question], target), 2 * MAX_NEW_TOKENS, target)
        answered = {"role": "assistant", "content": as_text(answer, target)}
        again = question if seed % 2 else conversation(seed + N_ASKED, 1)[0]
        prompts.append(as_prompt([question, answered, again], target))
    return prompts


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, id=name, marks=pytest.mark.full if kind.full else ()) for name, kind in KINDS.items()],
)
def serving(request: pytest.FixtureRequest, pool: Any, reference: Callable) -> Iterator[Serving]:
    kind: Kind = request.param
    prompts = asked_again(kind.target, reference)
    expected = [reference(prompt, MAX_NEW_TOKENS, kind.target) for prompt in prompts]
    running = pool.get(target=kind.target, flags=kind.flags, env=dict(COPY + kind.env))
    yield Serving(running, kind, prompts, expected)
    pool.drop(running)


@pytest.mark.parametrize("concurrency", [1, N_ASKED])
def test_answers_and_steps_are_the_definitions(serving: Serving, concurrency: int) -> None:
    """In the second round the prompts are in the prefix cache.

    Copies must use cached prompts although these are not prefilled again.
    """
    for _ in range(2):
        answers = serving.generate(concurrency)
        assert tokens_of(answers) == serving.expected
        if serving.kind.knows_steps and serving.kind.draft_window is None:
            assert list(map(steps, answers)) == steps_of(serving, copies=True)


def test_copies_take_fewer_steps(serving: Serving) -> None:
    if serving.kind.draft_window is not None or not serving.kind.knows_steps:
        pytest.skip("steps are not known here")
    taken = sum((Counter(one) for one in map(steps, serving.generate(1))), Counter()).total()
    without = sum((Counter(one) for one in steps_of(serving, copies=False)), Counter()).total()
    assert taken * 1.3 < without


def steps_of(serving: Serving, *, copies: bool) -> list[dict[int, int]]:
    kind = serving.kind
    expert = oracle(PAIRS[kind.target], None, kind.draft_window, kind.page_size)
    width = kind.width if copies else None
    return [expert.accepted_histogram(prompt, MAX_NEW_TOKENS, copies=copies, width=width) for prompt in serving.prompts]


@pytest.mark.full
@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_drawn_tokens_follow_from_their_seed(
    target: str, server: Callable, questions: Callable, reference: Callable
) -> None:
    """With a seed, sampled tokens must be equal with copies, without copies and without speculation.

    So the numbers of steps can be compared: copies may cost at most 1 % more steps.
    """
    repeating, alone = asked_again(target, reference), questions(N_ASKED, target, seed=60)
    flags = (*SEEDED_FLAGS, *(TRACK if target == "hybrid" else ()))
    drawn = {"temperature": 0.7, "sampling_seed": 5, "max_new_tokens": MAX_NEW_TOKENS}

    def answers(arm: str, prompts: list[list[int]], **env: str) -> list[Generation]:
        running = server(arm, target=target, flags=flags, env=SEEDED_ENV | env)
        return running.generate_many(prompts, concurrency=4, **drawn)

    for prompts in (repeating, alone):
        arms = answers("plugin", prompts, **dict(COPY)), answers("plugin", prompts), answers("off", prompts)
        copying, ours, off = (tokens_of(arm) for arm in arms)
        assert copying == ours == off
        assert off != [reference(prompt, MAX_NEW_TOKENS, target) for prompt in prompts]
        taken, without = (sum((Counter(steps(answer)) for answer in arm), Counter()).total() for arm in arms[:2])
        assert taken <= 1.01 * without


@pytest.mark.full
@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_random_copies_change_no_answer(target: str, server: Callable, reference: Callable) -> None:
    """Copies begin and end at random slots, and widths are random.

    The small KV pool makes SGLang retract some requests.
    """
    env = {"SGLANG_DFLASH_COPY": "random", "SGLANG_DFLASH_WIDTHS": "random"}
    flags = ("--max-total-tokens", "1400", *(TRACK if target == "hybrid" else ()))
    prompts = asked_again(target, reference)
    expected = [reference(prompt, MAX_NEW_TOKENS, target) for prompt in prompts]
    ours = server(target=target, flags=flags, env=env)
    for _ in range(2):
        assert tokens_of(ours.generate_many(prompts, concurrency=8, max_new_tokens=MAX_NEW_TOKENS)) == expected
