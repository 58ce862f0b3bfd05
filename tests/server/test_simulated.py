"""Simulated acceptance on servers: answers and steps equal those of SGLang's worker with the same variables."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.tools.check import served
from tests.server.lib.rehearsals import FA3, GRAPHS, SM90, TRACK
from tests.server.lib.talk import tokens_of

DRAFTS = {"SGLANG_SIMULATE_ACC_LEN": "4", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
# Default widths and copies, which the simulation replaces by whole blocks without copies.
DEFAULTS = {"SGLANG_DFLASH_WIDTHS": "auto", "SGLANG_DFLASH_COPY": "auto"}
N_NEW = 41  # the prompt's token, and 10 steps of 4 tokens


@pytest.fixture(scope="module")
def expected(server: Callable, questions: Callable) -> list[list[int]]:
    stock = server("stock", env=DRAFTS)
    answers = stock.generate_many(questions(6), concurrency=1, max_new_tokens=N_NEW, ignore_eos=True)
    assert {answer.meta["spec_accept_length"] for answer in answers} == {N_NEW / 10}
    return tokens_of(answers)


@pytest.fixture(
    scope="module",
    params=[(), pytest.param((*FA3, *GRAPHS, *TRACK), marks=pytest.mark.full)],
    ids=["torch-native", "captured"],
)
def ours(request: pytest.FixtureRequest, pool: Any) -> Iterator[Server]:
    running = pool.get("plugin", flags=request.param, env=DEFAULTS | DRAFTS | dict(SM90 if request.param else ()))
    yield running
    pool.drop(running)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_answers_and_steps_are_those_of_sglangs_worker(
    ours: Server, questions: Callable, expected: list[list[int]], concurrency: int
) -> None:
    answers = ours.generate_many(questions(6), concurrency=concurrency, max_new_tokens=N_NEW, ignore_eos=True)
    assert tokens_of(answers) == expected
    assert {answer.meta["spec_accept_length"] for answer in answers} == {N_NEW / 10}
    # A step in flight may run past the end of an answer.
    assert all(answer.meta["spec_correct_drafts_histogram"][3] >= 10 for answer in answers)


def test_every_report_names_the_simulation(ours: Server, questions: Callable) -> None:
    about = "4 tokens per step (match-expected, real-draft-token)"
    dflash = served.fetch(ours.url)
    assert dflash["simulated"] == {"length": 4, "method": "match-expected", "tokens": "real-draft-token"}
    assert (dflash["width"]["policy"], dflash["copies"]) == ("always 16", [])
    assert "acceptance is simulated, so answers are meaningless" in served.render(dflash)
    assert f"answers are meaningless, because acceptance is simulated: {about}" in ours.log_text()
    (answer,) = ours.generate_many(questions(1), concurrency=1, max_new_tokens=8)
    assert answer.meta["spec_simulated"] == about


def test_requests_that_need_real_answers_leave_the_server_alive(ours: Server, questions: Callable) -> None:
    (prompt,) = questions(1)
    with pytest.raises(ServerError, match="return_sampling_mask is not supported with simulated speculative"):
        ours.generate(prompt, fields={"return_sampling_mask": True}, max_new_tokens=8)
    with pytest.raises(ServerError, match=r"(?i)grammar"):
        ours.generate(prompt, max_new_tokens=16, regex="[0-9]{8}")
    assert ours.generate(prompt, max_new_tokens=8).meta["completion_tokens"] == 8
