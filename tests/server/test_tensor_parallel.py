"""Two tensor-parallel ranks over gloo answer like one rank, draw the same tokens, and gather no logits if greedy.

SGLang seeds all ranks alike, so they would agree without an exchange. The fixture `two_ranks` seeds them differently
(`unlike_ranks/`). With `SGLANG_SPEC_TP_SYNC=off` each rank keeps its own draw, and `test_ranks_draw_the_same_tokens`
fails: step lengths differ between the ranks, and the server hangs.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.pairs import HYBRID
from sglang_dflash.platforms.rehearsal.exchange import steps_in
from tests.server.lib.rehearsals import FA3, GRAPHS, SM90
from tests.server.lib.rows import GAP, require_logprobs
from tests.server.lib.talk import chat, tokens_of
from tests.server.lib.variants import RANDOM_WIDTHS, TRACK, TWO_NODES
from tests.tools import parameters
from tests.tools.parameters import EXACT, PLAIN, QUESTIONS, REQUEST_FLAGS, Case, Reply, greedy

FOLDER = Path(__file__).parent
UNLIKE, COUNTED = (parameters.path_with(FOLDER / name) for name in ("unlike_ranks", "counted_exchange"))
TWO_RANKS = {"flags": ("--tp", "2"), "env": dict(TWO_NODES) | UNLIKE}
MAX_NEW_TOKENS = 48

pytestmark = pytest.mark.full


WIDTHS = {"fixed": {}, "auto": {"SGLANG_DFLASH_WIDTHS": "auto"}, "random": dict(RANDOM_WIDTHS), "window": {}}


@pytest.fixture(scope="module", params=WIDTHS)
def two_ranks(request: pytest.FixtureRequest, server: Callable) -> Server:
    """Return a server of two ranks with different seeds.

    `auto`: each rank times its steps, and both must choose the same width. `random`: many steps decode one token.
    `window`: each rank has rings for its heads.
    """
    window = ("--speculative-draft-window-size", "64") if request.param == "window" else ()
    ranks = server(flags=[*TWO_RANKS["flags"], *window], env=TWO_RANKS["env"] | WIDTHS[request.param])
    assert all(f"random numbers of its own: rank {rank}" in ranks.log_text() for rank in (0, 1))
    return ranks


def test_two_ranks_answer_like_one(two_ranks: Server, questions: Callable, reference: Callable) -> None:
    prompts = questions(8)
    expected = [reference(prompt, MAX_NEW_TOKENS) for prompt in prompts]
    for concurrency in (1, 8):
        answers = two_ranks.generate_many(prompts, concurrency=concurrency, max_new_tokens=MAX_NEW_TOKENS)
        assert tokens_of(answers) == expected
    per_step = 2 if "SGLANG_DFLASH_WIDTHS=random" in two_ranks.name else 4
    assert sum(answer.meta["spec_verify_ct"] for answer in answers) < len(prompts) * MAX_NEW_TOKENS / per_step


def test_ranks_draw_the_same_tokens(two_ranks: Server, questions: Callable) -> None:
    """Compare log-probabilities of sampled text with Transformers'.

    Each rank stores K/V of its own heads for the tokens that it drew. If draws differed, later logits would be wrong.
    """
    prompts = questions(8, seed=11)
    sampling = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
    answers = two_ranks.generate_many(prompts, concurrency=4, fields={"return_logprob": True}, **sampling)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        require_logprobs(HYBRID.target, prompt, answer)


# -- exchange per step ---------------------------------------------------------------------------------------------

VOCABULARY = 1024  # size in the tiny pair
# Largest number of elements gathered per verified token. Each of two ranks gives a value and a token id: once for the
# verify, and up to twice for the draft, because its captured graph may be padded to almost twice the tokens.
PER_ROW = 2 * 2 * (1 + 2)
NEEDS_LOGITS = (
    greedy("frequency_penalty", "penalised", 0, frequency_penalty=1.2),
    greedy("min_new_tokens", "min_new_tokens", 0, min_new_tokens=MAX_NEW_TOKENS),
    greedy("logit_bias", "biased", 0, logit_bias={"20": 6.0}),
    greedy("regex", "grammar", 0, regex=r"([a-z]+ )+[a-z]+\."),
    greedy("temperature > 0", "sampled", 0, temperature=1.0),
    Case("logprobs", "logprobs", {}, {"return_logprob": True}),
    Case("return_sampling_mask", "masks", {}, {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}),
    parameters.processor("a processor", 0, parameters.NEWLINE),
)


@pytest.fixture(
    scope="module",
    params=[pytest.param((TRACK, ()), id="cpu"), pytest.param(((*FA3, *GRAPHS, *TRACK), SM90), id="emulated")],
)
def counted(request: pytest.FixtureRequest, server: Callable) -> Server:
    """Return a server whose ranks log each step's exchange. `emulated`: captured graphs verify up to eight requests."""
    flags, env = request.param
    return server(flags=[*flags, "--tp", "2", *REQUEST_FLAGS], env=dict(env) | dict(TWO_NODES) | COUNTED)


def gathered_per_row(
    server: Server, asked: list[tuple[list[int], Case]], concurrency: int = 8
) -> tuple[list[Reply], list[float]]:
    """Return the replies, and for every step the number of elements that a rank gathered per verified token."""
    n_before = len(server.log_text())
    replies = parameters.ask_all(server, asked, concurrency=concurrency)
    steps = steps_in(server.log_text()[n_before:])
    gathers = [sum(n for name, n in step.items() if "allgather" in name) for step in steps]
    return replies, [n / step["rows"] for n, step in zip(gathers, steps, strict=True)]


def test_greedy_steps_gather_numbers_not_logits(counted: Server) -> None:
    _, gathered = gathered_per_row(counted, [(chat(question), PLAIN) for question in QUESTIONS])
    assert len(gathered) > 20
    assert 0 < max(gathered) <= PER_ROW


@pytest.mark.parametrize("case", NEEDS_LOGITS, ids=str)
def test_steps_that_need_logits_gather_them(counted: Server, case: Case) -> None:
    """Every step must gather logits. This also shows that the log counts gathers inside captured graphs."""
    _, gathered = gathered_per_row(counted, [(chat(QUESTIONS[0]), case)])
    assert len(gathered) >= 2
    assert min(gathered) >= VOCABULARY


def test_mixed_batches_answer_as_without_speculation(counted: Server, off: Server) -> None:
    """Mix requests that need logits with plain ones, so that steps with and without a gather of logits alternate."""
    cases = [*EXACT, *[PLAIN] * len(EXACT)]
    asked = [(chat(question), case) for case in cases for question in QUESTIONS[:2]]
    Random(0).shuffle(asked)
    expected = parameters.ask_all(off, asked)
    replies, gathered = gathered_per_row(counted, asked, concurrency=3)
    assert min(gathered) <= PER_ROW < VOCABULARY <= max(gathered)
    for (_, case), wanted, found in zip(asked, expected, replies, strict=True):
        assert isinstance(wanted, list), f"{case}: {wanted}"
        assert isinstance(found, list), f"{case}: {found}"
        assert [sample.outcome for sample in found] == [sample.outcome for sample in wanted], case
        for a, b in zip(found, wanted, strict=True):
            assert parameters.furthest(parameters.numbers_of(a), parameters.numbers_of(b)) <= GAP, case
