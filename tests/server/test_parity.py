"""All request parameters at temperature 0: answers equal those without speculation, token for token, in fp32.

Every case of `tests.tools.parameters.EXACT` is sent with every question, in random order at concurrency 8, so a batch
mixes penalties, grammars and stop strings. Text, finish reason, token counts, logprobs and hidden states must agree
too. Further tests require that parameters change answers (`Case.bites`), and that drafts are accepted for each
`Case.row`.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.server.lib.talk import chat
from tests.server.lib.variants import VARIANTS
from tests.tools import parameters
from tests.tools.parameters import EXACT, PLAIN, QUESTIONS, Case, Refusal, Reply, Sample, answer_all, outcomes

FLAGS = {"hybrid": VARIANTS["hybrid"].flags, "dense": (*VARIANTS["dense"].flags, *parameters.REQUEST_FLAGS)}
GAP = 1e-4  # largest allowed difference of two numbers; fp32 sums are taken in another order
# Least acceptance length over all cases. Drafts ignore grammars and bans, so it is lower than for plain requests.
COMMITTED_PER_STEP = 2.0


class Battery(NamedTuple):
    """Replies of both servers: one per question for every case."""

    off: dict[str, list[Reply]]  # by the case's name
    ours: dict[str, list[Reply]]


@pytest.fixture(scope="module", params=["hybrid", pytest.param("dense", marks=pytest.mark.full)])
def battery(request: pytest.FixtureRequest, server: Callable) -> Battery:
    target = request.param
    prompts = [chat(question, target) for question in QUESTIONS]
    ours = server(target=target, flags=FLAGS[target])
    off = server("off", target=target)
    # The two servers get the requests in different orders, because answers must not depend on other requests of the
    # batch.
    return Battery(off=answer_all(off, EXACT, prompts, seed=1), ours=answer_all(ours, EXACT, prompts, seed=2))


def samples(replies: list[Reply]) -> list[Sample]:
    return [sample for reply in replies if not isinstance(reply, Refusal) for sample in reply]


def test_no_two_cases_share_a_name() -> None:
    assert len({case.name for case in EXACT}) == len(EXACT)


def test_a_logprob_of_another_token_is_infinitely_far() -> None:
    assert parameters.furthest({"a": [[-1.0, 5, None]]}, {"a": [[-1.25, 5, None]]}) == 0.25
    for other in ({"a": [[-1.0, 6, None]]}, {"a": []}, {"b": [[-1.0, 5, None]]}):
        assert parameters.furthest({"a": [[-1.0, 5, None]]}, other) == float("inf")


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_same_answer(battery: Battery, case: Case) -> None:
    off, ours = battery.off[case.name], battery.ours[case.name]
    assert not any(isinstance(reply, Refusal) for reply in off), f"{case}: refused without speculation: {off}"
    wrong = [i for i, pair in enumerate(zip(off, ours, strict=True)) if outcomes(pair[0]) != outcomes(pair[1])]
    first = wrong[0] if wrong else 0
    assert not wrong, (
        f"{case}: {len(wrong)} of {len(off)} answers differ, first for {QUESTIONS[first]!r}:\n"
        f"off  {outcomes(off[first])}\nours {outcomes(ours[first])}"
    )


@pytest.mark.parametrize("case", [case for case in EXACT if any("return" in field for field in case.fields)], ids=str)
def test_same_numbers(battery: Battery, case: Case) -> None:
    for question, off, ours in zip(QUESTIONS, battery.off[case.name], battery.ours[case.name], strict=True):
        for a, b in zip(samples([off]), samples([ours]), strict=True):
            assert parameters.numbers_of(a), f"{case}: no numbers came back"
            gap = parameters.furthest(parameters.numbers_of(a), parameters.numbers_of(b))
            assert gap <= GAP, f"{case}: {gap:.1e} apart for {question!r}"


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_the_case_changes_answers(battery: Battery, case: Case) -> None:
    """The parameter must change answers of `off`. Else a server that ignores it would pass `test_same_answer`."""
    plain = [sample.outcome for sample in samples(battery.off[PLAIN.name])]
    changed = sum(reply[0].outcome != before for reply, before in zip(battery.off[case.name], plain, strict=True))
    assert changed >= case.bites, f"{case}: changed {changed} of {len(plain)} answers; use a stronger value"


def test_drafts_are_accepted(battery: Battery) -> None:
    """If no draft were accepted, only the first slot of each block would be compared."""
    steps, accepted = dict[str, int](), dict[str, int]()
    for case in EXACT:
        metas = [sample.meta for sample in samples(battery.ours[case.name])]
        steps[case.row] = steps.get(case.row, 0) + sum(meta.get("spec_verify_ct", 0) for meta in metas)
        accepted[case.row] = accepted.get(case.row, 0) + sum(meta.get("spec_num_correct_drafts", 0) for meta in metas)
    assert 1 + sum(accepted.values()) / sum(steps.values()) > COMMITTED_PER_STEP
    assert all(accepted.values()), f"no draft accepted under {[row for row, n in accepted.items() if not n]}"
