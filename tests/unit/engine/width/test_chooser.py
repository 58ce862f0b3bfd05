"""Chooser: matching outcomes with decisions, timing steps, and reporting widths."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash import flags
from sglang_dflash.engine.metrics.trace import Trace
from sglang_dflash.engine.width.chooser import REPORT, Chooser, candidates, make_policy, widest
from sglang_dflash.engine.width.policy import Decision, Fixed, Policy
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import WidthPolicy


class Costs:
    """A cost model that records the times of steps."""

    def __init__(self) -> None:
        self.timed: list[tuple] = []
        self.by_size = lambda: {"1": {"4": 0.5}}

    def observe(self, n_requests: int, width: int, seconds: float) -> None:
        self.timed.append((n_requests, width, pytest.approx(seconds)))


class Scripted(Policy):
    """A policy that decides a given list of widths and records outcomes."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.name, self.widths = "scripted", iter(widths)
        self.observed: list[tuple] = []
        self.cost = Costs()

    def decide(self, rids: Sequence[str]) -> Decision:
        return Decision(next(self.widths), expected=2.0)

    def observe(self, rids: Sequence[str], decision: Decision, n_accepted_B: Sequence[int]) -> None:
        self.observed.append((list(rids), decision.width, list(n_accepted_B)))


def test_late_outcomes_match_their_decisions():
    policy = Scripted([8, 4, 4, 4])
    chooser = Chooser(policy)
    assert chooser.decide(["a"]) == 8
    assert chooser.decide(["a", "b"]) == 4
    chooser.observe([7], 1.0)
    assert chooser.decide(["b", "c"]) == 4
    chooser.observe([0, 3], 2.0)
    chooser.decide(["b", "c"])
    chooser.observe([1, 2], 3.5)
    assert policy.observed == [(["a"], 8, [7]), (["a", "b"], 4, [0, 3]), (["b", "c"], 4, [1, 2])]
    assert policy.cost.timed == [(2, 4, 1.5)]  # timed only if adjacent steps have the same batch size


def test_an_outcome_of_another_batch_is_refused():
    chooser = Chooser(Fixed(4))
    chooser.decide(["a", "b"])
    with pytest.raises(AssertionError, match="another step"):
        chooser.observe([1], 0.0)


def test_time_of_a_prompt_between_two_steps_is_not_counted():
    """The overlap schedule launches a prompt before the outcome of the previous step is known.

    The chooser does not get the prompt's result. Steps take 10 ms, the prompt takes 300 ms.
    """
    policy = Scripted([6] * 7)
    chooser = Chooser(policy)
    chooser.decide(["a", "b"])
    chooser.decide(["a", "b"])
    chooser.observe([1, 1], 0.010)
    chooser.interrupt()  # the launch of the prompt
    chooser.observe([1, 1], 0.020)
    chooser.decide(["a", "b"])
    chooser.decide(["a", "b"])
    chooser.observe([1, 1], 0.330)
    assert policy.cost.timed == []
    chooser.decide(["a", "b"])
    chooser.observe([1, 1], 0.340)
    assert policy.cost.timed == [(2, 6, 0.010)]


PROMPT = (0, 0)
Launch = tuple[int, int]  # requests and width of a step, or `PROMPT`


def took(launch: Launch) -> float:
    n_requests, width = launch
    return 300.0 if launch == PROMPT else n_requests + width / 8


class Loop:
    """Simulation of SGLang's scheduler loop.

    If `overlap`, the outcome of the previous launch follows each launch, else the launch's own outcome. If
    `host_computes` (a CPU), a launch has finished when it returns. Else a device runs the launches one after the other.
    """

    def __init__(self, launches: Sequence[Launch], *, overlap: bool, host_computes: bool) -> None:
        self.policy = Scripted([width for launch in launches if launch != PROMPT for width in launch[1:]])
        self.chooser, self.host_computes = Chooser(self.policy, host_computes=host_computes), host_computes
        self.host_s = self.device_s = 0.0
        ran = list[tuple[Launch, float]]()  # launches without an outcome yet, and their end times in s
        for launch, following in zip(launches, (*launches[1:], None), strict=True):
            ran.append((launch, self.launch(launch)))
            if not overlap or len(ran) == 2:
                self.read(*ran.pop(0), following)
        for last in ran:
            self.read(*last, None)

    def launch(self, launch: Launch) -> float:
        if launch == PROMPT:
            self.chooser.interrupt()
        else:
            self.chooser.decide([str(i) for i in range(launch[0])], now_s=self.host_s)
        self.host_s += took(launch) if self.host_computes else 0.01
        self.device_s = max(self.device_s, self.host_s) + took(launch)
        return self.host_s if self.host_computes else self.device_s

    def read(self, launch: Launch, ended_s: float, following: Launch | None) -> None:
        self.host_s = max(self.host_s, ended_s)
        if launch != PROMPT:
            self.chooser.observe([0] * launch[0], self.host_s)
        if following is not None and following[0] < launch[0]:
            self.host_s += 50.0  # the host's work for a request that ends


alike = st.tuples(st.tuples(st.integers(1, 3), st.sampled_from((1, 4, 8))), st.integers(1, 6))
launches = st.lists(st.one_of(st.just((PROMPT, 1)), alike), min_size=1, max_size=12).map(
    lambda runs: [launch for launch, n in runs for _ in range(n)]
)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host_computes", [True, False])
@given(launches=launches)
def test_timed_steps_took_the_measured_time(launches, overlap, host_computes):
    """Times must be exact within 20 ms in any sequence of steps and prompts. The host needs 10 ms per launch."""
    for n_requests, width, seconds in Loop(launches, overlap=overlap, host_computes=host_computes).policy.cost.timed:
        assert seconds.expected == pytest.approx(took((n_requests, width)), abs=0.02)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host_computes", [True, False])
def test_all_but_the_ends_of_equal_runs_are_timed(host_computes, overlap):
    loop = Loop([(2, 4)] * 10 + [PROMPT] + [(2, 8)] * 10, overlap=overlap, host_computes=host_computes)
    n_timed = [sum(width == timed[1] for timed in loop.policy.cost.timed) for width in (4, 8)]
    assert min(n_timed) >= 8


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host_computes", [True, False])
def test_a_step_is_timed_between_steps_of_other_widths(host_computes: bool, overlap: bool) -> None:
    loop = Loop([(2, 1), (2, 1), (2, 8), (2, 1), (2, 1)], overlap=overlap, host_computes=host_computes)
    assert 8 in {timed[1] for timed in loop.policy.cost.timed}


def test_a_cpu_times_each_step_that_a_step_follows() -> None:
    """Two of the three steps between two prompts are timed: the last one is followed by a prompt."""
    loop = Loop([PROMPT, (2, 4), (2, 8), (2, 1)] * 3, overlap=True, host_computes=True)
    assert {width for _, width, _ in loop.policy.cost.timed} == {4, 8}
    assert len(loop.policy.cost.timed) >= 5


def test_outcomes_are_traced_as_they_arrive(tmp_path):
    chooser = Chooser(Scripted([4, 8]), Trace(tmp_path / "new", None).add)
    chooser.decide(["a"])
    chooser.decide(["a", "b"])
    (file,) = (tmp_path / "new").iterdir()
    assert file.read_text() == ""
    chooser.observe([3], 1.0)
    chooser.observe([0, 7], 1.5)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"s": 1.0, "width": 4, "accepted": {"a": 3}},
        {"s": 1.5, "width": 8, "accepted": {"a": 0, "b": 7}},
    ]


def test_a_report_covers_all_steps(caplog):
    """The log gets a line every `REPORT` steps."""
    chooser = Chooser(Scripted([4] * REPORT + [8] * REPORT + [8] * 5))
    with caplog.at_level("INFO"):
        for step in range(2 * REPORT + 5):
            chooser.decide(["a", "b"])
            chooser.observe([step % 4, 0], 0.0)
    first, second = caplog.messages
    assert first == f"widths of {REPORT} steps: 4 in 100%; acceptance length 1.75"
    assert second.startswith(f"widths of {REPORT} steps: 8 in 100%; ")
    assert json.loads(json.dumps(chooser.describe())) == {
        "policy": "scripted",
        "seconds": {"1": {"4": 0.5}},
        "n_steps": {"4": REPORT, "8": REPORT + 5},
        "n_blocks": 2 * (2 * REPORT + 5),
        "committed": sum(2 + step % 4 for step in range(2 * REPORT + 5)),
        "acceptance_length": sum(2 + step % 4 for step in range(2 * REPORT + 5)) / (2 * (2 * REPORT + 5)),
        "expected": (2 * REPORT + 5) * 2 * 2.0,
        "account": f"widths of {2 * REPORT + 5} steps: 4 in 50%, 8 in 50%; acceptance length 1.75",
    }


@pytest.mark.parametrize(("useful", "n_warnings"), [(0, 1), (9, 1), (10, 0)])
def test_a_draft_that_is_never_accepted_is_warned_of_once(useful, n_warnings, caplog):
    """The warning appears if fewer than 10 of 500 blocks have an accepted draft, of which each has three here.

    Steps without drafts do not count.
    """
    chooser = Chooser(Scripted([1, 8] * 1000))
    for step in range(2000):
        chooser.decide(["a"])
        chooser.observe([0 if step % 2 == 0 or step // 2 % 500 >= useful else 3], float(step))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == n_warnings
    assert all(warning.startswith(f"only {useful} of 500 drafted blocks ") for warning in warnings)


def test_the_report_before_the_first_step_is_empty():
    assert Chooser(Fixed(4)).describe() == {
        "policy": "always 4", "seconds": {}, "n_steps": {}, "n_blocks": 0, "committed": 0, "acceptance_length": 0.0,
        "expected": 0.0, "account": "",
    }  # fmt: skip


def asked(value: str, block_size: int = 16, **where: str) -> tuple[int, ...]:
    return candidates(flags.read({"SGLANG_DFLASH_WIDTHS": value}), block_size, **({"no_copies": ""} | where))


@pytest.mark.parametrize(
    ("value", "block_size", "widths", "most"),
    [
        ("auto", 16, (1, 4, 8, 12, 16), 16),
        ("random", 8, (1, 4, 8), 8),
        ("fixed", 16, (16,), 16),
        ("8,1", 16, (1, 8), 16),
        ("8,32", 16, (8, 32), 32),
    ],
)
def test_candidate_widths(value, block_size, widths, most):
    assert asked(value, block_size) == widths
    assert (widest(block_size, widths), widest(block_size, ())) == (most, block_size)


@pytest.mark.parametrize("value", ["auto", "random", "fixed", "16"])
def test_a_target_that_cannot_narrow_verifies_whole_blocks(value):
    assert asked(value, no_copies="off", whole_blocks="it cannot") == (16,)


@pytest.mark.parametrize(
    ("value", "where", "error", "sentence"),
    [
        (
            "1,16",
            {"no_copies": "off", "whole_blocks": "it cannot"},
            NotSupported,
            r"^SGLANG_DFLASH_WIDTHS=1,16: this server .* \(it cannot\); set the variable to 16, or unset it$",
        ),
        ("0,40", {"whole_blocks": "it cannot"}, NotSupported, "verifies only whole blocks"),  # so no width is right
        ("0,4", {}, ValueError, r"SGLANG_DFLASH_WIDTHS: 0 is not within 1\.\.32; remove 0, or unset the variable$"),
        ("33", {}, ValueError, r"SGLANG_DFLASH_WIDTHS: 33 is not within 1\.\.32; remove 33"),
        ("0", {"no_copies": "the flag"}, ValueError, r"SGLANG_DFLASH_WIDTHS: 0 is not within 1\.\.16;"),
        ("17", {"no_copies": "the flag"}, NotSupported, r"17 exceeds the block of 16 .*: the flag\); remove 17, or"),
        ("33", {"no_copies": "the flag"}, NotSupported, "33 exceeds the block of 16"),
    ],
)
def test_impossible_widths_are_refused(value, where, error, sentence):
    with pytest.raises(error, match=sentence):
        asked(value, **where)


def test_each_kind_makes_its_policy():
    timed: list[int] = []

    def seconds(n_requests: int, widths: Sequence[int]) -> list[float]:
        timed.append(n_requests)
        return [float(width) for width in widths]

    def make(kind: WidthPolicy, widths: Sequence[int]) -> Policy:
        return make_policy(kind, widths, n_requests=6, seconds=seconds, agree=lambda seconds_SW: None)

    fixed, random, again = make(WidthPolicy.AUTO, (4,)), *(make(WidthPolicy.RANDOM, (1, 4)) for _ in range(2))
    assert (fixed.name, {fixed.decide(["a"]).width for _ in range(9)}) == ("always 4", {4})
    drawn = [random.decide(["a"]).width for _ in range(30)]
    assert (random.name, set(drawn)) == ("random", {1, 4})
    assert drawn == [again.decide(["a"]).width for _ in range(30)], "the same on every rank"
    assert timed == [], "steps are timed only if a policy compares widths"
    auto = make(WidthPolicy.AUTO, (1, 4))
    assert timed == [1, 2, 4, 6]
    n_drafts = 0.98 + 0.98**2 + 0.98**3  # a probability is at most 0.98
    assert (auto.name, auto.decide(["a"])) == ("auto", pytest.approx(Decision(4, 1 + n_drafts, n_drafts)))
    assert auto.cost.by_size() == {size: {"1": 1.0, "4": 4.0} for size in ("1", "2", "4", "6")}
