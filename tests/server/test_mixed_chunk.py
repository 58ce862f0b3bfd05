"""`--enable-mixed-chunk`: one forward reads a chunk of prompts and one token of each running request.

A running request has no draft in such a step. So it may have fewer drafted steps than the PyTorch reference, but each
of its drafted steps must accept what the reference accepts at that place of the answer.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_dflash.pairs.servers.server import Generation, Server
from tests.server.conftest import PAIRS
from tests.server.lib.oracle import oracle
from tests.server.lib.rehearsals import FA3, GRAPHS, SM90
from tests.server.lib.talk import LOGPROBS, require_same_logprobs, steps, together, tokens_of
from tests.server.lib.variants import NO_OVERLAP, PAGES, RANDOM_WIDTHS, TRACK, strategy, window

CHUNK = ("--enable-mixed-chunk", "--chunked-prefill-size", "16")
N_PROMPTS, CONCURRENCY, MAX_NEW_TOKENS = 16, 5, 48
WINDOW = 64


class Row(NamedTuple):
    """A server; without `draft_window` its drafts attend to all context tokens."""

    target: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    draft_window: int | None = None


ROWS = {
    "hybrid": Row("hybrid", TRACK),
    "hybrid-no-buffer": Row("hybrid", (*strategy("no_buffer"), *NO_OVERLAP)),
    "dense-window": Row("dense", window(WINDOW), draft_window=WINDOW),
    "fa3-graphs": Row("hybrid", (*FA3, *GRAPHS, *TRACK), SM90),
    # Running requests count towards a chunk, which has whole pages.
    "fa3-graphs-pages": Row("dense", (*FA3, *GRAPHS, *PAGES, "--chunked-prefill-size", "32"), SM90),
}


class Serving(NamedTuple):
    server: Server
    row: Row
    prompts: list[list[int]]
    expected: list[list[int]]
    trace: Path


@pytest.fixture(scope="module", params=["hybrid", *(pytest.param(r, marks=pytest.mark.full) for r in [*ROWS][1:])])
def serving(
    request: pytest.FixtureRequest, pool: Any, questions: Callable, reference: Callable, tmp_path_factory: Any
) -> Iterator[Serving]:
    row, trace = ROWS[request.param], tmp_path_factory.mktemp("trace")
    env = dict(row.env) | {"SGLANG_DFLASH_WIDTH_TRACE": str(trace)}
    server = pool.get(target=row.target, flags=(*CHUNK, *row.flags), env=env)
    asked = questions(N_PROMPTS, row.target, seed=5)
    prompts = [asked[i] + asked[i - 1] + asked[i - 2] for i in range(N_PROMPTS)]  # several chunks each
    yield Serving(server, row, prompts, [reference(p, MAX_NEW_TOKENS, row.target) for p in prompts], trace)
    pool.drop(server)


ids = count()


def ask(serving: Serving, fields: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Generation]:
    """Send all prompts; return the answers by the requests' ids, in the order of the prompts."""
    serving.server.flush_cache()
    rids = [f"mixed-{next(ids)}" for _ in serving.prompts]
    options = [{"fields": {"rid": rid, **(fields or {})}, "max_new_tokens": MAX_NEW_TOKENS} | sampling for rid in rids]
    answers = together(serving.server, list(zip(serving.prompts, options, strict=True)), CONCURRENCY)
    return dict(zip(rids, answers, strict=True))


def n_mixed(answer: Generation) -> int:
    """Return a lower bound of the number of tokens from mixed steps. A last block may exceed the answer."""
    return len(answer.token_ids) - 1 - sum((n + 1) * n_steps for n, n_steps in steps(answer).items())


def accepted_of(trace: Path) -> dict[str, list[int]]:
    """Return the accepted drafts of each drafted step, by request. A step may run past the end of an answer."""
    accepted = defaultdict[str, list[int]](list)
    (file,) = trace.iterdir()
    for line in map(json.loads, file.read_text().splitlines()):
        for rid, n in line["accepted"].items():
            accepted[rid].append(n)
    return accepted


def explained(accepted: Sequence[int], predicted: Sequence[int]) -> bool:
    """Return whether the drafted steps agree with the reference, with any number of mixed steps between them.

    Args:
        accepted: accepted drafts of each drafted step.
        predicted: the reference's accepted drafts of a block anchored at each token of the answer. Drafts past the
            known answer do not count.
    """
    earliest = 0
    for n in accepted:
        ends = [at for at in range(earliest, len(predicted)) if agrees(n, at, predicted)]
        if not ends:
            return False
        earliest = ends[0] + n + 1
    return True


def agrees(n: int, at: int, predicted: Sequence[int]) -> bool:
    to_the_end = len(predicted) - 1 - at
    return n == predicted[at] or (predicted[at] == to_the_end < n)


def test_answers_and_drafted_steps_are_plain_torchs(serving: Serving) -> None:
    answers = ask(serving)
    assert tokens_of(answers.values()) == serving.expected
    assert sum(max(n_mixed(answer), 0) for answer in answers.values()) > N_PROMPTS, "hardly a step was mixed"
    expert, accepted = oracle(PAIRS[serving.row.target], None, serving.row.draft_window), accepted_of(serving.trace)
    texts = zip(serving.prompts, serving.expected, strict=True)
    predicted = [expert.accepted_at(prompt, answer) for prompt, answer in texts]
    drafted = [accepted[rid][: answer.meta["spec_verify_ct"]] for rid, answer in answers.items()]
    found = [explained(its, wanted) for its, wanted in zip(drafted, predicted, strict=True)]
    assert all(found), found
    others = [explained(its, wanted) for its, wanted in zip(drafted, [*predicted[1:], predicted[0]], strict=True)]
    assert sum(others) < N_PROMPTS / 2, "answers of other prompts explain the steps too: little was compared"


@pytest.mark.parametrize(
    "options",
    [{"fields": {"return_logprob": True}}, {"regex": "[a-z ]{40}"}, {"frequency_penalty": 0.5}],
    ids=["logprobs", "grammar", "penalty"],
)
def test_other_requests_answer_as_alone(serving: Serving, options: dict[str, Any]) -> None:
    """Requests whose tokens depend on more than the logits are not mixed."""
    alone = [serving.server.generate(p, max_new_tokens=MAX_NEW_TOKENS, **options) for p in serving.prompts[:4]]
    answers = ask(serving, **options)
    assert tokens_of(answers.values())[:4] == tokens_of(alone)
    assert not any(n_mixed(answer) > 0 for answer in answers.values())


@pytest.mark.full
def test_a_turn_after_a_mixed_step_answers_as_without_the_cache(serving: Serving) -> None:
    """Compare the next turn with and without the cached prefix, after answers that end in a mixed step.

    Such a step reads the anchor, which SGLang does not count if the request ends.
    """
    ask_for = {"max_new_tokens": 4}
    n_ends = 0
    for pair in zip(serving.prompts[::2], serving.prompts[1::2], strict=True):
        serving.server.flush_cache()
        answers = together(serving.server, [(prompt, ask_for) for prompt in pair], 2)
        n_ends += sum(n_mixed(answer) > 0 for answer in answers)
        turns = [[*prompt, *answer.token_ids, 5] for prompt, answer in zip(pair, answers, strict=True)]
        cached = [serving.server.generate(turn, fields=LOGPROBS, **ask_for) for turn in turns]
        for turn, answer in zip(turns, cached, strict=True):
            serving.server.flush_cache()
            require_same_logprobs(answer, serving.server.generate(turn, fields=LOGPROBS, **ask_for))
    assert n_ends > 0, "no request ended in a mixed step"


@pytest.mark.full
def test_widths_and_copies_change_no_answer(serving: Serving, pool: Any) -> None:
    env = dict(serving.row.env) | dict(RANDOM_WIDTHS) | {"SGLANG_DFLASH_COPY": "random"}
    server = pool.get(target=serving.row.target, flags=(*CHUNK, *serving.row.flags), env=env)
    assert tokens_of(ask(serving._replace(server=server)).values()) == serving.expected
    pool.drop(server)
