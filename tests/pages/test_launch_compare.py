"""The verdicts of the comparison of workers, and the table drawn from them."""

import pytest

from tests.tools import parameters
from tests.tools.compare_workers import Verdict, cell, judge, judge_draws, table
from tests.tools.parameters import Refusal, Sample

Reply = parameters.Reply


def said(*token_ids: int, logprob: float = -0.5) -> Reply:
    meta = {
        "prompt_tokens": 3,
        "completion_tokens": len(token_ids),
        "finish_reason": {"type": "length", "length": len(token_ids)},
        "output_token_logprobs": [[logprob, token, None] for token in token_ids],
    }
    return [Sample(list(token_ids), " ".join(map(str, token_ids)), meta)]


OFF, PLAIN = [said(1, 2), said(3, 4)], [said(1, 9), said(3, 4)]


@pytest.mark.parametrize(
    ("replies", "kind", "n"),
    [
        (OFF, "exact", 2),
        ([said(1, 7), said(3, 4)], "wrong", 1),
        (PLAIN, "ignored", 1),
        ([Refusal(400, "no"), said(3, 4)], "refused", 1),
        ([said(1, 2, logprob=-0.6), said(3, 4)], "wrong", 1),
    ],
)
def test_a_verdict_on_answers(replies: list[Reply], kind: str, n: int) -> None:
    verdict = judge(OFF, PLAIN, replies)
    assert (verdict.kind, verdict.n, verdict.of) == (kind, n, 2)
    assert bool(verdict.example) == (kind != "exact")


def test_a_verdict_on_draws() -> None:
    with_it, without = [(1, 1)] * 300 + [(2, 2)] * 100, [(1, 1)] * 100 + [(2, 2)] * 300
    assert judge_draws(with_it, without, with_it).kind == "same law"
    assert judge_draws(with_it, without, without).kind == "ignored"
    assert judge_draws(with_it, without, [(3, 3)] * 400).kind == "another law"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([Verdict("exact", 8, 8)] * 3, "exact (24 answers)"),
        ([Verdict("exact", 8, 8), Verdict("wrong", 5, 8, "x")], "**wrong**: 3 of 16 answers differ"),
        ([Verdict("exact", 8, 8), Verdict("ignored", 2, 8, "x")], "**ignored**: 6 of 16 answers differ"),
        ([Verdict("refused", 0, 8, "400 not here")], "refused: 400 not here"),
        ([Verdict("same law", 600, 600)] * 2, "same law (1200 draws)"),
        (
            [Verdict("exact", 8, 8), Verdict("same law", 600, 600), Verdict("ignored", 600, 600, "x")],
            "exact (8 answers); **ignored** in 1 of 2 settings",
        ),
    ],
)
def test_a_cell_names_the_worst(verdicts: list[Verdict], expected: str) -> None:
    assert cell(verdicts) == expected


def test_the_table_has_a_line_per_parameter_in_the_order_of_the_cases() -> None:
    good, bad = Verdict("exact", 8, 8)._asdict(), Verdict("wrong", 6, 8, "x")._asdict()
    rows = [{"row": row, "stock": bad, "plugin": good} for row in ("stop", "stop", "regex")]
    assert table(rows).splitlines()[2:] == [
        "| regex | **wrong**: 2 of 8 answers differ | exact (8 answers) |",
        "| stop | **wrong**: 4 of 16 answers differ | exact (16 answers) |",
    ]


def test_a_logprob_of_another_token_is_infinitely_far() -> None:
    near = parameters.furthest({"a": [[-1.0, 5, None]]}, {"a": [[-1.25, 5, None]]})
    assert near == 0.25
    for other in ({"a": [[-1.0, 6, None]]}, {"a": []}, {"b": [[-1.0, 5, None]]}):
        assert parameters.furthest({"a": [[-1.0, 5, None]]}, other) == float("inf")


def test_an_ignored_verdict_needs_every_wrong_answer_to_be_the_plain_one() -> None:
    assert judge([said(1), said(2)], [said(8), said(9)], [said(8), said(7)]).kind == "wrong"
