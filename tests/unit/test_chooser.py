"""Which outcome belongs to which decision, and what the decisions came to."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_dflash import flags
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import WidthPolicy
from sglang_dflash.width.chooser import REPORT, Account, Chooser, Fixed, Random, Trace, candidates, make_policy
from sglang_dflash.width.clock import DecisionClock, OutcomeClock
from sglang_dflash.width.policy import Adaptive, Decision


class Scripted:
    """Decides what it is told to, expects a step to take a tenth of its width, and remembers what it hears."""

    name = "scripted"

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = iter(widths)
        self.heard: list[tuple] = []
        self.timed: list[tuple] = []

    def seconds(self) -> dict[str, dict[str, float]]:
        return {}

    def decide(self, rids: Sequence[str]) -> Decision:
        width = next(self.widths)
        return Decision(width, committed={width: 1.0}, seconds={width: width / 10})

    def observe(self, rids: Sequence[str], decision: Decision, n_accepted_B: Sequence[int]) -> None:
        self.heard.append((list(rids), decision.width, list(n_accepted_B)))

    def time(self, n_requests: int, width: int, seconds: float) -> None:
        self.timed.append((n_requests, width, pytest.approx(seconds)))


def test_outcomes_arrive_late_and_in_order() -> None:
    policy = Scripted([8, 4, 4])
    chooser = Chooser(policy, OutcomeClock)
    assert chooser.choose(["a"], 0.0) == 8
    assert chooser.choose(["a", "b"], 0.5) == 4
    chooser.observe([7], 1.0)
    assert chooser.choose(["b", "c"], 1.5) == 4
    chooser.observe([0, 3], 2.0)
    chooser.observe([1, 2], 3.5)
    assert policy.heard == [(["a"], 8, [7]), (["a", "b"], 4, [0, 3]), (["b", "c"], 4, [1, 2])]
    assert policy.timed == [(2, 4, 1.5)]  # only the last had one of its own kind before it


def test_a_prompt_read_between_two_steps_is_no_part_of_the_second() -> None:
    """Under the overlap schedule the prompt is launched before the outcome of the step before it is known, and the
    prompt's own result is none of the chooser's business. Steps take 10 ms, the prompt 300."""
    policy = Scripted([6] * 7)
    chooser = Chooser(policy, OutcomeClock)
    chooser.choose(["a", "b"], 0.000)
    chooser.choose(["a", "b"], 0.001)
    chooser.observe([1, 1], 0.010)
    chooser.interrupt()  # the launch of the prompt
    chooser.observe([1, 1], 0.020)
    chooser.choose(["a", "b"], 0.021)
    chooser.choose(["a", "b"], 0.321)
    chooser.observe([1, 1], 0.330)
    assert policy.timed == []
    chooser.observe([1, 1], 0.340)
    assert policy.timed == [(2, 6, 0.010)]


def test_where_the_host_computes_a_step_ends_with_the_next_decision() -> None:
    policy = Scripted([8, 4, 4])
    chooser = Chooser(policy, DecisionClock)
    chooser.choose(["a", "b"], 0.0)
    chooser.choose(["a", "b"], 0.5)
    chooser.observe([7, 0], 1.0)
    chooser.interrupt()
    chooser.choose(["b", "c"], 1.5)
    assert policy.timed == [(2, 8, 0.5)]


def test_an_outcome_of_another_batch_is_noticed() -> None:
    chooser = Chooser(Fixed(4), DecisionClock)
    chooser.choose(["a", "b"], 0.0)
    with pytest.raises(AssertionError, match="another step"):
        chooser.observe([1], 0.0)


def test_every_outcome_is_written_when_it_is_known(tmp_path: Path) -> None:
    chooser = Chooser(Scripted([4, 8]), DecisionClock, Trace(tmp_path / "new"))
    chooser.choose(["a"], 0.0)
    chooser.choose(["a", "b"], 0.5)
    (file,) = (tmp_path / "new").iterdir()
    assert file.read_text() == ""
    chooser.observe([3], 1.0)
    chooser.observe([0, 7], 1.5)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"s": 1.0, "width": 4, "accepted": {"a": 3}},
        {"s": 1.5, "width": 8, "accepted": {"a": 0, "b": 7}},
    ]


def test_the_account_by_hand() -> None:
    """Two requests. Narrower widths are counted from what was accepted, wider ones as was expected."""
    expected = {"committed": {1: 1.0, 4: 2.0, 8: 2.5}, "seconds": {1: 1.0, 4: 2.0, 8: 4.0}}
    account = Account()
    account.add(Decision(4, **expected), [0, 3])
    account.add(Decision(8, **expected), [7, 1])
    assert dict(account.n_steps) == {4: 1, 8: 1}
    assert (account.committed, account.expected, account.seconds) == (5 + 10, 2 * 2.0 + 2 * 2.5, 2.0 + 4.0)
    assert account.committed_always == {1: 4, 4: 5 + (4 + 2), 8: (5 + 2 * 0.5) + 10}
    assert account.seconds_always == {1: 2.0, 4: 4.0, 8: 8.0}
    assert account.best == 4
    assert account.regret == pytest.approx(1 - (15 / 6) / (11 / 4))
    assert str(account) == (
        "widths of 2 steps: 4 in 50%, 8 in 50%; 3.75 tokens per request and step (2.25 expected); 9.1% below always 4"
    )


def test_without_a_choice_there_is_nothing_to_regret() -> None:
    account = Account()
    account.add(Decision(4), [0, 3])
    assert (account.best, account.regret) == (None, 0.0)
    assert str(account) == "widths of 1 steps: 4 in 100%; 2.50 tokens per request and step"


@pytest.mark.parametrize(
    ("value", "widths"),
    [("auto", (1, 2, 4, 6, 8, 12, 16)), ("random", (1, 2, 4, 6, 8, 12, 16)), ("fixed", (16,)), ("8,1", (1, 8))],
)
def test_widths_to_choose_from(value: str, widths: tuple[int, ...]) -> None:
    assert candidates(flags.read({"SGLANG_DFLASH_WIDTHS": value}), 16) == widths


@pytest.mark.parametrize("value", ["auto", "random", "fixed", "16"])
def test_a_target_that_cannot_narrow_verifies_whole_blocks(value: str) -> None:
    assert candidates(flags.read({"SGLANG_DFLASH_WIDTHS": value}), 16, may_narrow=False) == (16,)


def test_narrower_widths_are_refused_where_the_target_cannot() -> None:
    with pytest.raises(NotSupported, match=r"verifies whole blocks of this target .*; set it to 16, or drop it"):
        candidates(flags.read({"SGLANG_DFLASH_WIDTHS": "1,16"}), 16, may_narrow=False)


@pytest.mark.parametrize("value", ["0,4", "17"])
def test_a_width_outside_the_block_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"SGLANG_DFLASH_WIDTHS: (0|17) is not within 1\.\.16, .* drop it"):
        candidates(flags.read({"SGLANG_DFLASH_WIDTHS": value}), 16)


def test_a_policy_for_each_kind() -> None:
    timed: list[int] = []

    def seconds(n_requests: int, widths: Sequence[int]) -> list[float]:
        timed.append(n_requests)
        return [float(width) for width in widths]

    def make(kind: WidthPolicy, widths: Sequence[int]) -> object:
        return make_policy(kind, widths, n_requests=6, seconds=seconds, agree=lambda seconds_SW: None)

    assert isinstance(make(WidthPolicy.RANDOM, (1, 4)), Random)
    assert isinstance(make(WidthPolicy.AUTO, (4,)), Fixed)
    assert timed == [], "what is not chosen from is not timed"
    assert isinstance(make(WidthPolicy.AUTO, (1, 4)), Adaptive)
    assert timed == [1, 2, 4, 6]


def test_accounts_are_joined() -> None:
    expected = {"committed": {4: 2.0, 8: 2.5}, "seconds": {4: 2.0, 8: 4.0}}
    steps = [(Decision(4, **expected), [0, 3]), (Decision(8, **expected), [7, 1]), (Decision(8, **expected), [2])]
    at_once, first, later = Account(), Account(), Account()
    for account, some in ((at_once, steps), (first, steps[:1]), (later, steps[1:])):
        for step in some:
            account.add(*step)
    first.join(later)
    assert vars(first) == vars(at_once)


def test_a_report_covers_all_steps() -> None:
    """Those in the log's lines as well as those since."""
    chooser = Chooser(Scripted([4] * (REPORT + 5)), DecisionClock)
    for step in range(REPORT + 5):
        chooser.choose(["a"], float(step))
        chooser.observe([step % 4], step + 0.5)
    report = chooser.describe()
    assert report["n_steps"] == {"4": REPORT + 5}
    assert report["committed"] == sum(1 + step % 4 for step in range(REPORT + 5))
    assert report["policy"] == "scripted"
    json.dumps(report)
