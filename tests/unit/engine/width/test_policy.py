"""Width policy: estimated acceptance, estimated step costs, and the choice between widths.

A rest is `REST` steps without drafts before each step with drafts. A look is a step that verifies the whole block to
learn about widths that the policy does not choose.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.engine.width import acceptance as acceptance_module
from sglang_dflash.engine.width.acceptance import ALL_DECAY, DECAY, WARM_UP, Acceptance, Counts, Own, odds, probability
from sglang_dflash.engine.width.chooser import Chooser
from sglang_dflash.engine.width.cost import RECENT, StepCost
from sglang_dflash.engine.width.policy import (
    EARLY,
    EXPLORE,
    REST,
    SETTLE,
    TIMED,
    TRIAL,
    Adaptive,
    Decision,
    Rhythm,
    Trials,
)

N = 8  # tokens of a block
D = N - 1
WIDTHS = (1, 2, 4, 8)
RIDS = ("a", "b", "c", "d", "e")
MEMORY = 32  # steps until an observation of a request has weight 1/e

Step = tuple[list[str], int, list[int]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw requests, a width, and the number of accepted drafts per request."""
    rids = draw(st.lists(st.sampled_from(RIDS), min_size=1, unique=True))
    width = draw(st.sampled_from(WIDTHS))
    return rids, width, [draw(st.integers(0, width - 1)) for _ in rids]


def trained(history: Sequence[Step]) -> Acceptance:
    """Return an `Acceptance` that has observed `history`, with no request treated as a warm-up request."""
    acceptance = Acceptance(D)
    for step in history:
        for rid in step[0]:
            acceptance.of_request.setdefault(rid, Own(acceptance.nothing)).kept = None
        acceptance.observe(*step)
    return acceptance


def now(weight: float, counts: Counts) -> np.ndarray:
    """Return how often each draft was reached and accepted, [2, D]. Observations of the last step have weight 1."""
    return np.array(counts).T / weight


def conditional(acceptance: Acceptance, rid: str) -> np.ndarray:
    """Return the estimated acceptance of every draft, given that all drafts before it were accepted."""
    survival_D = np.diff(acceptance.expected([rid]))[1:]
    return survival_D / np.concatenate(([1.0], survival_D[:-1]))


def alone(seconds_SW: np.ndarray) -> None:
    """Leave the costs as they are: a single rank needs no agreement."""


def step_cost(seconds_W: Sequence[float], widths: Sequence[int] = WIDTHS) -> StepCost:
    return StepCost(widths, {1: seconds_W}, alone)


def test_fewer_requests_never_cost_more_than_more() -> None:
    """The machine was busy while one request was timed, and a wide verify seemed cheap compared with a narrow one."""
    cost = StepCost((1, 4), {1: (0.44, 0.59), 2: (0.08, 0.15), 4: (0.13, 0.22)}, alone)
    assert [cost.of(n) for n in (1, 2, 4)] == [[0.08, 0.15], [0.08, 0.15], [0.13, 0.22]]


@given(st.lists(steps(), max_size=30), steps())
def test_expected_length_is_concave_and_at_most_the_width(history: list[Step], last: Step) -> None:
    expected_N = trained(history).expected(last[0])
    assert expected_N[:2] == [0, 1]
    assert (expected_N <= np.arange(N + 1) + 1e-9).all()
    gains_N = np.diff(expected_N)
    assert (gains_N >= 0).all()
    assert (np.diff(gains_N) <= 1e-9).all()


@given(st.lists(steps(), max_size=10), st.integers(1, 5), st.sampled_from(WIDTHS[:-1]))
def test_unverified_drafts_do_not_count_as_failures(history: list[Step], n: int, width: int) -> None:
    """If a step accepts every verified draft, the counts of later positions only decay."""
    acceptance = trained([*history, (list(RIDS), 1, [0] * len(RIDS))])
    before_2D = now(acceptance.all_weight, acceptance.batch)
    for _ in range(n):
        acceptance.observe(RIDS, width, [width - 1] * len(RIDS))
    after_2D = now(acceptance.all_weight, acceptance.batch)
    np.testing.assert_allclose(after_2D[:, width - 1 :], before_2D[:, width - 1 :] * ALL_DECAY**n)
    assert (after_2D[:, : width - 1] >= before_2D[:, : width - 1] * ALL_DECAY**n).all()


def test_unseen_positions_get_the_estimate_of_the_one_before() -> None:
    acceptance = trained([(["a"], 4, [3])] * 50 + [(["a"], 4, [2])] * 50)
    conditional_D = conditional(acceptance, "new")
    assert conditional_D[2] < 0.5 < 0.9 < conditional_D[1]  # the third draft failed in 50 steps, the second never
    np.testing.assert_allclose(conditional_D[3:], conditional_D[2])


def test_positions_keep_what_was_observed_of_them() -> None:
    """Half of 100 steps accept all drafts, half none. 320 more failures of the first draft lower only its estimate."""
    acceptance = trained([(["a"], N, [0]), (["a"], N, [D])] * 50 + [(["a"], 2, [0])] * 10 * MEMORY)
    conditional_D = conditional(acceptance, "new")
    assert conditional_D[0] < 0.1
    assert (conditional_D[1:] > 0.9).all()


def test_a_step_is_no_evidence_after_its_first_failure() -> None:
    acceptance = trained([(["a", "b"], N, [0, 3])])
    reached_accepted_2D = now(acceptance.all_weight, acceptance.batch).tolist()
    assert reached_accepted_2D == [[2, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]]


def test_estimates_of_a_request_shrink_to_the_others() -> None:
    """A request's estimate has a prior: the estimate over all requests, with odds multiplied by the request's level.

    The prior has a weight of 4 observations. The prior of a level is the level of new requests, with a weight of 2
    drafts. That level has a prior of 1, with a weight of 8 drafts. The first of two new requests counts 0.7.
    The estimate over all requests has its last value as a prior, with a weight of 4 observations:
    - 1 at first
    - (1 + 4 * 1) / (1 + 4) = 1 once the draft of "a" is accepted
    - (1 + 4 * 1) / (2 + 4) = 5/6 once the draft of "b" is rejected
    - (1 + 4 * 5/6) / (2 + 4) = 13/18 when it is read, because the last value is 5/6 now
    """
    acceptance = trained([(["a", "b"], 2, [1, 0])])
    estimate = {rid: acceptance.expected([rid])[2] - 1 for rid in ("a", "b", "new")}
    usual, certain = 13 / 18, 0.98  # before the step all requests were estimated at 1, which counts as 0.98
    at_new = (0.7 + 8 * certain) / (1.7 + 8)
    assert estimate["new"] == pytest.approx(probability(odds(at_new) / odds(certain) * odds(usual)))
    for rid, accepted in (("a", 1), ("b", 0)):
        level = odds((accepted + 2 * at_new) / 3) / odds(certain)
        assert estimate[rid] == pytest.approx((accepted + 4 * probability(level * odds(usual))) / 5)
    each = [acceptance.expected([rid]) for rid in ("a", "b")]
    np.testing.assert_allclose(acceptance.expected(["a", "b"]), np.mean(each, axis=0))


def test_failed_first_drafts_leave_later_positions_unchanged() -> None:
    acceptance = trained([([f"good-{i}"], N, [D]) for i in range(50)])
    usual_D = conditional(acceptance, "new")
    for _ in range(5):
        acceptance.observe(["a"], N, [0])
    estimate_D = conditional(acceptance, "a")
    assert estimate_D[0] < 0.5 * usual_D[0]
    np.testing.assert_allclose(estimate_D[1:], usual_D[1:], rtol=0.05)


def test_one_step_distinguishes_a_good_request_from_bad_ones() -> None:
    """One wholly accepted block raises the request's estimate, even after 100 requests that accept nothing."""
    acceptance = trained([([f"bad-{i}"], N, [0]) for i in range(100)])
    assert acceptance.expected(["good"])[N] < 1.1
    acceptance.observe(["good"], N, [D])
    assert acceptance.expected(["good"])[N] > 2
    acceptance.observe(["good"], N, [D])
    assert acceptance.expected(["good"])[N] > 4


def test_one_bad_request_does_not_determine_the_estimate_of_the_next() -> None:
    good = [([f"good-{i}"], N, [D]) for i in range(100)]
    before, after = trained(good), trained([*good, *[(["bad"], N, [0])] * 5])
    assert after.expected(["new"])[N] > 0.75 * before.expected(["new"])[N]


def test_a_new_request_is_estimated_by_first_blocks() -> None:
    """One of ten requests accepts 40 whole blocks, the others have one block and accept nothing.

    So most blocks are accepted, but few first blocks. The first blocks of about three requests count, and the prior
    weighs as much as eight.
    """
    good = [[([f"good-{i}"], N, [D])] * 40 for i in range(10)]
    bad = [[([f"bad-{i}-{j}"], N, [0]) for j in range(9)] for i in range(10)]
    acceptance = trained([step for both in zip(bad, good, strict=True) for steps in both for step in steps])
    (usual,) = acceptance._of_all(1)
    assert usual > 0.8, "of all blocks, 400 of 490 accept their first draft"
    assert acceptance.expected(["new"])[2] - 1 < 0.9 * usual


def test_new_requests_lower_their_estimate_soon() -> None:
    """After 300 requests that accept everything, eight accept nothing."""
    acceptance = trained([([f"good-{i}"], N, [D]) for i in range(300)])
    acceptance.observe([f"bad-{i}" for i in range(8)], 1, [0] * 8)
    for own in acceptance.of_request.values():
        own.kept = None
    acceptance.observe([f"bad-{i}" for i in range(8)], N, [0] * 8)
    assert acceptance.expected(["new"])[2] < 1.75


@pytest.mark.parametrize(
    ("width", "n_accepted", "first", "further"),
    [
        (1, 0, (0, 0), (0, 0)),
        (2, 1, (1, 1), (0, 0)),
        (4, 0, (1, 0), (0, 0)),
        (4, 1, (1, 1), (1, 0)),
        (4, 3, (1, 1), (2, 2)),  # the fourth draft was not verified
        (N, D, (1, 1), (D - 1, D - 1)),
    ],
)
def test_levels_count_the_drafts_that_were_reached(width: int, n_accepted: int, first: tuple, further: tuple) -> None:
    """Each level counts drafts that were reached, and those of them that were accepted."""
    own = trained([(["a"], width, [n_accepted])]).of_request["a"]
    assert [(level.n_reached, level.n_accepted) for level in (own.levels.first, own.levels.further)] == [first, further]


def test_warm_up_requests_are_not_learned_from() -> None:
    acceptance = Acceptance(D)
    fresh_N = acceptance.expected(["new"])
    for _ in range(WARM_UP):
        acceptance.observe(["warm-up"], N, [0])
    assert acceptance.expected(["new"]) == fresh_N
    acceptance.observe(["warm-up"], N, [0])
    assert acceptance.expected(["new"])[N] < 0.5 * fresh_N[N], "all nine steps count now"


def test_observations_decay() -> None:
    """A request's observation has weight 1/e after `MEMORY` steps without drafts, or steps of other requests."""
    drafted_once = trained([(["a"], N, [7])] + [(["a"], 1, [0])] * MEMORY)
    others = trained([(["a"], N, [7])] + [(["b"], N, [7])] * MEMORY)
    for acceptance in (drafted_once, others):
        np.testing.assert_allclose(now(acceptance.weight, acceptance.of_request["a"].counts), np.exp(-1))
    np.testing.assert_allclose(now(drafted_once.all_weight, drafted_once.batch), ALL_DECAY**MEMORY)


def test_weights_never_outgrow_a_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rescaling the weights leaves estimates unchanged."""
    history = [(["a", "b"], N, [7, i % N]) for i in range(50)] + [(["a"], 1, [0])] * 50
    heavy = trained(history)
    monkeypatch.setattr(acceptance_module, "HEAVY", 3.0)
    light = trained(history)
    assert light.weight < 3 < heavy.weight
    np.testing.assert_allclose(light.expected(["a", "b"]), heavy.expected(["a", "b"]))


def test_few_ended_requests_are_kept() -> None:
    acceptance = trained([([f"request-{i}", "stays"], N, [7, i % N]) for i in range(1000)])
    assert len(acceptance.of_request) < 100
    stays = now(acceptance.weight, acceptance.of_request["stays"].counts)
    assert stays[0, 0] == pytest.approx(1 / (1 - DECAY), rel=0.01), "its observations are complete"
    np.testing.assert_array_equal(acceptance.expected(["request-1"]), acceptance.expected(["never seen"]))


def test_a_large_batch_is_forgotten_as_fast_as_a_small_one() -> None:
    """Batches of 1 or 16 requests accept everything. Then one request after the other, alone, accepts nothing."""
    n_steps = []
    for n_requests in (1, 16):
        rids = [str(i) for i in range(n_requests)]
        acceptance = trained([(rids, N, [D] * n_requests)] * 4 * round(1 / (1 - ALL_DECAY)))
        n_steps.append(0)
        while acceptance.expected(["new"])[-1] > 2:
            acceptance.observe([f"bad-{n_steps[-1] // 20}"], N, [0])
            n_steps[-1] += 1
    assert n_steps[1] <= 1.1 * n_steps[0]


def make_cost() -> StepCost:
    return StepCost((1, 4, 8), {2: (1.0, 2.0, 3.0), 4: (2.0, 6.0, 5.0), 8: (3.0, 7.0, 9.0)}, alone)


@pytest.mark.parametrize(
    ("n_requests", "seconds"), [(1, [1, 2, 3]), (3, [1.5, 4, 4]), (4, [2, 6, 5]), (5, [2.25, 6.25, 6]), (99, [3, 7, 9])]
)
def test_costs_between_measured_sizes(n_requests: int, seconds: list[float]) -> None:
    np.testing.assert_allclose(make_cost().of(n_requests), seconds)


def test_a_step_counts_at_the_nearest_size() -> None:
    """Sizes 2, 4 and 8 were measured. Of two equally near sizes the larger one counts."""
    cost = make_cost()
    cost.observe(5, 4, 6.25)
    counts = [(cost.n_real(n, 4), cost.last(n, 4)) for n in (1, 2, 3, 5, 6, 8)]
    assert counts == [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0), (0, 0)]


def test_costs_are_those_of_the_batch_that_runs() -> None:
    """Width 4 has graphs for 4 and 6 requests, width 8 for 4 and 8. Steps of 5 requests pay for 6 and for 8."""
    cost, exact = make_cost(), make_cost()
    sizes = {1: range(9), 4: (4, 6), 8: (4, 8)}
    cost.look_up(lambda n, width: next((size for size in sizes[width] if size >= n), n))
    assert cost.of(5) == [exact.of(5)[0], exact.of(6)[1], exact.of(8)[2]]
    assert cost.of(1) == [exact.of(1)[0], *exact.of(4)[1:]]
    cost.observe(5, 8, 9.9)
    assert [cost.n_real(n, 8) for n in (4, 5, 7, 8)] == [0, 1, 1, 1]
    cost.settle()
    assert cost.of(4)[2] == exact.of(4)[2], "a step at a captured size corrects this size only"


@given(st.integers(1, 10), st.sampled_from((1, 4, 8)), st.floats(0.5, 5.0))
def test_costs_converge_to_measured_times(n_requests: int, width: int, real: float) -> None:
    """In logarithms, at least half of the correction of a width's time also applies to the other widths."""
    cost = make_cost()
    w, before_W = cost.widths.index(width), cost.of(n_requests)
    for _ in range(1000):
        cost.observe(n_requests, width, real)
    assert cost.of(n_requests) == before_W, "costs change only once the ranks have agreed"
    cost.settle()
    assert cost.of(n_requests)[w] == pytest.approx(real, rel=1e-3)
    if n_requests not in cost.sizes:  # interpolated between two sizes, each corrected by its weight
        return
    moved_W = np.log(np.array(cost.of(n_requests)) / before_W)
    others_W = np.delete(moved_W, w)
    np.testing.assert_allclose(others_W, others_W[0], atol=1e-12)
    assert 0.5 * abs(moved_W[w]) <= abs(others_W[0]) <= abs(moved_W[w]) + 1e-9


def test_other_batch_sizes_keep_their_costs() -> None:
    """A step of three requests at width 4 took 4.4 s instead of 4 s. The error is 10 %, so 5 % for each adjacent size.

    A fraction 0.1 (`COMMON`) of the 5 % corrects all widths of the size. A fraction 0.03 (`OWN`) also corrects width 4.
    """
    cost = make_cost()
    cost.observe(3, 4, 4.4)
    cost.settle()
    np.testing.assert_allclose(cost.of(8), [3, 7, 9])
    np.testing.assert_allclose(cost.of(2), [1.005, 1.005 * 1.0015 * 2, 1.005 * 3])
    np.testing.assert_allclose(cost.of(4), [1.005 * 2, 1.005 * 1.0015 * 6, 1.005 * 5])


# A slowdown by 2 for a while, in steps at width 4.
SLOWER = [(4, seconds) for seconds in (2.0, 4.0, 2.0) for _ in range(200)]
# case: (seconds measured at launch, real steps as (width, seconds), learned seconds, tolerance), for widths 1, 4 and 8
TAUGHT: dict[str, tuple[Sequence[float], list[tuple[int, float]], list[float], dict[str, float]]] = {
    # At launch all widths took the same time. In real steps only width 4 takes twice as long.
    "one width costs more than measured": ((1, 1, 1), [(1, 1.0), (4, 2.0), (8, 1.0)] * 1000, [1, 2, 1], {"atol": 0.15}),
    # Every step takes twice as long as at launch. Width 8 takes another second, which was not measured at launch.
    "launch missed a second of one width": ((1, 2, 2), [*[(4, 4.0)] * 8, (8, 5.0)] * 100, [2, 4, 5], {"rtol": 0.1}),
    "the machine was slower for a while": ((1, 2, 3), SLOWER, [1, 2, 3], {"atol": 0.1}),
}


@pytest.mark.parametrize("case", TAUGHT)
def test_costs_separate_one_widths_share_from_the_common_one(case):
    launch, steps_taken, learned, tolerance = TAUGHT[case]
    cost = step_cost(launch, (1, 4, 8))
    for width, seconds in steps_taken:
        cost.observe(1, width, seconds)
    cost.settle()
    np.testing.assert_allclose(cost.of(1), learned, **({"rtol": 1e-7} | tolerance))


def test_a_disturbed_step_counts_only_up_to_a_limit() -> None:
    """The relative error of one disturbed step counts as at most 15 % (`MOST`). A step of 5 s is expected here."""
    for disturbed in (50.0, 500.0):
        cost = make_cost()
        cost.observe(4, 8, disturbed)
        cost.settle()
        np.testing.assert_allclose(cost.of(4), [1.015 * 2, 1.015 * 6, 1.015 * (1 + 0.03 * 0.15) * 5])


def test_a_step_that_seemed_short_is_forgotten_after_five() -> None:
    """A first step is believed if it is shorter than at launch, by a factor of at most 4 (`FASTER`)."""
    for disturbed in (1.0, 0.0):
        cost = make_cost()
        cost.observe(4, 8, disturbed)
        cost.settle()
        np.testing.assert_allclose(cost.of(4)[2], 5 / 4, rtol=0.02)
        for _ in range(4):
            cost.observe(4, 8, 5.0)
        cost.settle()
        np.testing.assert_allclose(cost.of(4)[2], 5.0)


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_wrong_launch_is_forgotten_within_32_steps(factor: float) -> None:
    """At launch a step took a third of the real 1 s, or three times as long. Every fourth real step takes 10 s."""
    policy = Adaptive(WIDTHS, step_cost([factor * s for s in (1.0, 1.6, 2.4, 4.0)]))
    for step in range(32):
        policy.decide(["a"])
        policy.cost.observe(1, 1, 10.0 if step % 4 == 2 else 1.0)
    policy.decide(["a"])
    np.testing.assert_allclose(policy.cost.of(1)[0], 1.0, rtol=0.25)


STEPS_MS = {  # true times at widths 1, 4 and 8
    "SmolLM2, 8 requests": (46.0, 104.3, 158.4), "SmolLM2, 1 request": (32.7, 45.0, 52.6), "H200": (15.9, 20.2, 21.2)
}  # fmt: skip


def rates(table: str, launch: dict[int, float], accepted: float, n_steps: int, *, overlap: bool) -> list[float]:
    """Serve one request at the true times `STEPS_MS[table]`; return each step's rate, relative to the best width's.

    Times vary by 3 %, and one step in 20 takes twice as long. `launch`: factors on times from start-up, by width.
    """
    widths, random = (1, 4, 8), Random(0)
    true_s = dict(zip(widths, STEPS_MS[table], strict=True))
    policy = Adaptive(widths, step_cost([true_s[width] * launch.get(width, 1) for width in widths], widths))
    policy.acceptance = Certain(committed(accepted))
    policy.rhythm.observe = lambda rested, accepted, expected: None
    policy.drafted.add("a")
    chooser, chosen, running, now_s = Chooser(policy), list[int](), deque[int](), 0.0
    for _ in range(n_steps):
        chosen.append(chooser.decide(["a"]))
        running.append(chosen[-1])
        if not overlap or len(running) == 2:
            now_s += true_s[running.popleft()] * random.uniform(0.97, 1.03) * (2 if random.random() < 0.05 else 1)
            chooser.observe([0], now_s)
    rate = {width: committed(accepted)[width - 1] / true_s[width] for width in widths}
    return [rate[width] / max(rate.values()) for width in chosen]


@pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("wrong", [1, 4, 8])
@pytest.mark.parametrize("table", STEPS_MS)
@pytest.mark.parametrize("accepted", [0.1, 0.4, 0.5, 0.8, 0.97])  # widths differ by less than 3 %, or clearly
def test_one_wrong_time_of_launch_is_healed_within_32_steps(
    accepted: float, table: str, wrong: int, factor: float, overlap: bool
) -> None:
    """After 32 steps at most 3 % of the rate is lost."""
    assert np.mean(rates(table, {wrong: factor}, accepted, 96, overlap=overlap)[32:]) >= 0.97


@pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])
def test_looks_that_cost_more_than_at_launch_become_rare(overlap: bool) -> None:
    """A look takes twice as long as at launch. With the overlap schedule a single step is not timed."""
    assert np.mean(rates("SmolLM2, 8 requests", {8: 0.5}, 0.1, 2000, overlap=overlap)) >= 0.985


def test_ranks_exchange_times_only_after_news() -> None:
    """News are the first two real times of a width, and the median of the first `RECENT` ones."""
    exchanged = list[int]()
    cost = StepCost((1, 4), {1: (1.0, 2.0)}, lambda seconds_SW: exchanged.append(1))
    exchanged.clear()
    policy = Adaptive((1, 4), cost)
    after = list[int]()
    for step in range(1, SETTLE):
        policy.decide(["a"])
        cost.observe(1, 1, 1.0)
        if exchanged:
            after.append(step)
            exchanged.clear()
    assert after == sorted({2, 3, RECENT + 1, *EARLY})


def test_a_timed_trial_makes_the_next_pause_short_again() -> None:
    n_timed = [0]
    trials = Trials(SimpleNamespace(n_real=lambda n_requests, width: n_timed[0], nearest=lambda n_requests, width: 0))

    def pause(*, is_timed: bool) -> int:
        """Run a trial, and return the number of steps from its end to the beginning of the next one."""
        while trials.next(1, 4) is None:
            pass
        n_timed[0] += TIMED * is_timed
        while trials.next(1, None) is not None:
            pass
        return trials.n_pause

    assert [pause(is_timed=timed) for timed in (False, False, True, False)] == [SETTLE, 2 * SETTLE, 1, SETTLE]


def test_a_trial_goes_on_while_the_nearest_size_is_the_same() -> None:
    """Sizes 2, 4 and 8 were measured. A trial of 8 requests goes on with 6, and ends with 5."""
    for n_requests, goes_on in ((6, True), (5, False)):
        trials = Trials(make_cost())
        assert trials.next(8, 4) == 4
        assert (trials.next(n_requests, None) == 4) is goes_on


def test_a_trial_uses_the_present_estimates() -> None:
    """A trial of width 4 begins. Then the estimate changes."""
    policy = adaptive(committed(0.4), (1.0, 2.0, 3.0, 9.0))
    for _ in range(RECENT):
        policy.cost.observe(1, 1, 1.0)
    before, policy.acceptance, policy.is_stale = policy.decide(["a"]), Certain(committed(0.5)), True
    after = policy.decide(["a"])
    assert before.width == after.width > 1
    assert [one.n_drafts for one in (before, after)] == pytest.approx(
        [committed(p)[before.width - 1] - 1 for p in (0.4, 0.5)]
    )


def test_a_timed_trial_is_not_repeated() -> None:
    """A large batch is reviewed in one of three steps. So the trial of width 2 ends before the next review."""
    rids, seconds_W = [str(i) for i in range(40)], (1.0, 2.0, 3.0, 9.0)
    policy = adaptive(committed(0.4), seconds_W)
    policy.drafted.update(rids)
    for _ in range(RECENT):
        policy.cost.observe(40, 1, 1.0)
    widths = list[int]()
    for _ in range(SETTLE - 2):
        widths.append(policy.decide(rids).width)
        policy.cost.observe(40, widths[-1], seconds_W[WIDTHS.index(widths[-1])])
    assert [widths.count(width) for width in (2, 4)] == [TIMED, TIMED]


def test_trials_that_are_never_timed_become_rare() -> None:
    """No step of a trial is timed. Each pause is twice as long as the last."""
    policy = adaptive(committed(0.4), (1.0, 2.0, 3.0, 9.0))
    for _ in range(RECENT):
        policy.cost.observe(1, 1, 1.0)
    decisions = [policy.decide(["a"]) for _ in range(4000)]
    assert all(each.n_drafts == pytest.approx(committed(0.4)[each.width - 1] - 1) for each in decisions)
    widths = [each.width for each in decisions]
    trials = [i for i, width in enumerate(widths) if width in (2, 4)]
    assert set(widths) == {1, 2, 8}
    assert trials[: 2 * TRIAL] == [*range(TRIAL), *range(TRIAL + SETTLE, 2 * TRIAL + SETTLE)]
    assert len(trials) <= 0.02 * len(widths)


class Certain(Acceptance):
    """Stand-in for `Acceptance` with fixed estimates."""

    def __init__(self, committed_N: Sequence[float]) -> None:
        super().__init__(D)
        self.committed_N = [0.0, *committed_N]

    def expected(self, rids: Sequence[str]) -> list[float]:
        return self.committed_N


def widths_of(policy: Adaptive, n_steps: int) -> list[int]:
    """Return the widths decided for one request whose outcomes are not observed."""
    return [policy.decide(["a"]).width for _ in range(n_steps)]


def committed(conditional: float) -> list[float]:
    return [sum(conditional**i for i in range(width)) for width in range(1, N + 1)]


costs = st.lists(st.floats(0.5, 8.0), min_size=len(WIDTHS), max_size=len(WIDTHS))


def adaptive(committed_N: Sequence[float], seconds_W: Sequence[float]) -> Adaptive:
    policy = Adaptive(WIDTHS, step_cost(seconds_W))
    policy.acceptance = Certain(committed_N)
    policy.drafted.update(("a", "another"))  # the first step of a new request would be a look
    return policy


@given(st.floats(0.05, 0.99), costs)
def test_the_width_with_the_best_rate_is_chosen(conditional: float, seconds_W: list[float]) -> None:
    """The first choice has the most tokens per second at any step costs, unless it is an almost free look."""
    committed_N = committed(conditional)
    rate_W = [committed_N[width - 1] / seconds for width, seconds in zip(WIDTHS, seconds_W, strict=True)]
    chosen = WIDTHS.index(adaptive(committed_N, seconds_W).decide(["a"]).width)
    assert rate_W[chosen] >= max(rate_W) * (1 - 2 * EXPLORE) or chosen == len(WIDTHS) - 1
    if chosen != len(WIDTHS) - 1:
        assert rate_W[chosen] == max(rate_W)


def test_a_local_minimum_does_not_hide_a_better_width() -> None:
    """Widths 4 and 8 cost the same. At acceptance 0.98 width 4 is worse than width 2, and width 8 is the best."""
    assert adaptive(committed(0.6), (1.0, 1.1, 3.0, 3.0)).decide(["a"]).width == 2
    assert adaptive(committed(0.98), (1.0, 1.1, 3.0, 3.0)).decide(["a"]).width == 8


def test_ties_go_to_the_widest() -> None:
    for seconds_W, widest in (((1, 2, 4, 8), 8), ((9, 2, 4, 80), 4)):
        policy = adaptive(range(1, N + 1), seconds_W)
        assert widths_of(policy, 100) == [widest] * 100


@given(st.floats(0.0, 0.99), costs)
def test_exploring_costs_at_most_a_share_of_the_time(conditional: float, seconds_W: list[float]) -> None:
    committed_N = committed(conditional)
    policy = adaptive(committed_N, seconds_W)
    chosen = [WIDTHS.index(policy.decide(["a"]).width) for _ in range(1000)]
    seconds = sum(seconds_W[w] for w in chosen)
    best = max(committed_N[width - 1] / seconds_W[w] for w, width in enumerate(WIDTHS))
    lost = seconds - sum(committed_N[WIDTHS[w] - 1] for w in chosen) / best
    assert lost <= EXPLORE * seconds + 1e-6


def test_hopeless_widths_are_not_explored() -> None:
    """At 10 % acceptance one of 1000 steps accepts all drafts of width 4. So width 8 could not pay even if all further
    drafts were certain.
    """
    policy = adaptive(committed(0.1), (9.0, 9.0, 1.0, 1.8))
    assert set(widths_of(policy, 5000)) == {4}
    hopeful = adaptive(committed(0.9), (9.0, 9.0, 1.0, 1.8))
    assert set(widths_of(hopeful, 5000)) == {4, 8}


def test_at_most_one_block_is_saved_for_exploring() -> None:
    """At first looks are nearly free, so the budget for looks grows to its limit, the 1.5 s of a whole block.

    Then a look costs 0.5 s, so the budget pays for three looks.
    """
    policy = adaptive([1, 2, 3, 4, 4.5, 5, 5.5, 5.9999], (9.0, 9.0, 1.0, 1.5))
    assert set(widths_of(policy, 5000)) == {8}
    policy.acceptance = Certain([1, 2, 3, 4, 4, 4, 4, 4])
    chosen = [policy.decide(["another"]).width for _ in range(20)]
    assert chosen == [8] * 3 + [4] * 17


@given(st.lists(steps(), max_size=30))
def test_ranks_with_equal_input_decide_the_same(history: list[Step]) -> None:
    ranks = [Adaptive(WIDTHS, step_cost((1, 2, 2.5, 4))) for _ in range(2)]
    for rids, _, n_accepted_B in history:
        decision, other = [rank.decide(rids) for rank in ranks]
        assert decision == other
        for rank in ranks:
            rank.observe(rids, decision, [min(n, decision.width - 1) for n in n_accepted_B])
    assert ranks[0].saved_s == ranks[1].saved_s


def test_ranks_with_clocks_of_their_own_decide_the_same() -> None:
    """Ranks measure different step times. `agree` replaces them by the first rank's."""
    first = list[np.ndarray]()

    def agree(rank: int) -> Callable[[np.ndarray], None]:
        def at_rank(seconds_SW: np.ndarray) -> None:
            first.append(seconds_SW.copy()) if rank == 0 else np.copyto(seconds_SW, first.pop())

        return at_rank

    launch = [{1: (1.0 + rank, 2.0, 2.5, 4.0)} for rank in range(2)]
    ranks = [Adaptive(WIDTHS, StepCost(WIDTHS, launch[rank], agree(rank))) for rank in range(2)]
    chosen = list[list[int]]()
    for step in range(20 * SETTLE):
        widths = []
        for rank, policy in enumerate(ranks):
            decision = policy.decide(["a"])
            widths.append(decision.width)
            policy.observe(["a"], decision, [min(step % 3, widths[-1] - 1)])
            policy.cost.observe(1, widths[-1], 2.0 + rank + widths[-1] / 3)
        chosen.append(widths)
    assert all(a == b for a, b in chosen)
    assert len({a for a, _ in chosen}) > 1, "the width never changed"


@pytest.mark.parametrize(("n_requests", "n_looks"), [(1, 2), (8, 2)])
def test_widths_follow_changes_of_acceptance(n_requests: int, n_looks: int) -> None:
    """All drafts are accepted, then none, then all. The width drops within 64 steps and rises after `n_looks` looks."""
    # Number of steps until the width drops, and between two looks. A look takes 4 s instead of the 1 s of width 1.
    down, look = 64, 1 + round((4 - 1) / EXPLORE)
    rids = [f"request-{i}" for i in range(n_requests)]
    policy = Adaptive(WIDTHS, step_cost((1.0, 1.6, 2.4, 4.0)))

    def run(n_steps: int, *, is_easy: bool) -> list[int]:
        chosen = []
        for _ in range(n_steps):
            decision = policy.decide(rids)
            chosen.append(decision.width)
            policy.observe(rids, decision, [is_easy * (chosen[-1] - 1)] * n_requests)
        return chosen

    assert set(run(300, is_easy=True)) == {8}
    hard = run(2000, is_easy=False)[down:]
    assert set(hard) == {1, 8}
    assert hard.count(1) >= 0.99 * len(hard)
    easy = run(n_looks * look + 100, is_easy=True)
    assert set(easy[n_looks * look :]) == {8}


Rate = float  # tokens per second, relative to no speculation
CHEAP = (1.0, 1.3, 1.5, 2.0)


def served(
    policy: Adaptive, accept: Sequence[float], n_requests: int, n_tokens: int, seconds_W: Sequence[float]
) -> list[Rate]:
    """Serve groups of `n_requests` one after the other and return each group's rate.

    `accept`: the probability that a draft is accepted, by group.
    """
    rates, draws = [], np.random.default_rng(0)
    for group, p in enumerate(accept):
        rids = [f"{group}-{i}" for i in range(n_requests)]
        left, seconds = [n_tokens] * n_requests, 0.0
        while max(left) > 0:
            decision = policy.decide(rids)
            accepted = [int(np.cumprod(draws.random(decision.width - 1) < p).sum()) for _ in rids]
            policy.observe(rids, decision, accepted)
            left = [n - a - 1 for n, a in zip(left, accepted, strict=True)]
            seconds += seconds_W[policy.widths.index(decision.width)]
        rates.append(n_tokens / (seconds / seconds_W[0]))
    return rates


def test_every_request_is_explored_first() -> None:
    """A look costs the time of one token, and a hopeless request has at most two looks: 2 % of its 100 tokens."""
    policy = Adaptive(WIDTHS, step_cost(CHEAP))
    assert min(served(policy, [0.0] * 20, 1, 100, CHEAP)[1:]) > 0.98
    assert policy.decide(["new"]).width == N
    assert policy.decide(["new"]).width == 1


@pytest.mark.parametrize(("n_requests", "width"), [(8, 16), (32, 16), (33, 8), (64, 8), (200, 4)])
def test_a_look_of_a_large_batch_verifies_at_most_512_rows(n_requests: int, width: int) -> None:
    """The narrowest width of a look is the second one, here 4."""
    policy = Adaptive((1, 4, 8, 16), StepCost((1, 4, 8, 16), {1: (1.0, 1.1, 1.2, 1.3)}, alone))
    policy.acceptance = Certain([0.0, *([1.0] * 16)])
    assert policy.decide([str(i) for i in range(n_requests)]).width == width


def test_a_lone_request_leaves_the_debt_of_batches() -> None:
    """A batch's look costs 8 times a step of one token. Then one of its requests runs alone, and a new one."""
    policy = Adaptive((1, 8), StepCost((1, 8), {1: (1.0, 8.0)}, alone))
    policy.acceptance = Certain([0.0, *([1.0] * 8)])
    assert policy.decide(["a", "b"]).width == 8
    debt_s = policy.saved_s
    assert debt_s == pytest.approx(-6, abs=0.1)
    assert policy.decide(["a"]).width == 1
    assert policy.decide(["new"]).width == 8
    assert policy.saved_s == pytest.approx(debt_s, abs=0.1)


def test_a_large_batch_is_counted_in_parts() -> None:
    """Each of three steps counts a third of 40 requests, and one of them reviews the estimates."""
    policy = Adaptive(WIDTHS, step_cost(CHEAP))
    rids = [str(i) for i in range(40)]
    reviews, counted = list[object](), list[int]()
    for _ in range(6):
        decision = policy.decide(rids)
        policy.observe(rids, decision, [decision.width - 1] * 40)
        reviews.append(policy.review)
        counted.append(sum(own.counts[0][0] > 0 for own in policy.acceptance.of_request.values()))
    assert counted == [13, 26, 40, 40, 40, 40]
    assert len(set(map(id, reviews))) <= 3


@pytest.mark.parametrize("before", [[0.0], [0.0] * 50, [0.0, 1.0] * 10])
def test_an_easy_request_after_hopeless_ones_is_as_fast_as_its_repetition(before: list[float]) -> None:
    *_, first, again = served(Adaptive(WIDTHS, step_cost(CHEAP)), [*before, 1.0, 1.0], 1, 87, CHEAP)
    assert first >= 0.9 * again


def test_a_batch_of_new_requests_explores_within_its_budget() -> None:
    seconds_W = (1.0, 2.0, 3.0, 4.0)
    hopeless = served(Adaptive(WIDTHS, step_cost(seconds_W)), [0.0] * 40, 8, 100, seconds_W)
    assert np.mean(hopeless[4:]) >= 0.99 - 1e-3
    *_, easy, again = served(Adaptive(WIDTHS, step_cost(seconds_W)), [0.0] * 8 + [1.0] * 2, 8, 87, seconds_W)
    assert easy >= 0.8 * again


def test_observations_affect_the_next_steps() -> None:
    policy = Adaptive(WIDTHS, step_cost((1.0, 1.6, 2.4, 4.0)))
    chosen = []
    for _ in range(SETTLE // 2):
        decision = policy.decide(["a"])
        chosen.append(decision.width)
        policy.observe(["a"], decision, [0])
    assert chosen[0] == 8
    assert chosen[-1] == 1


def test_costs_are_learned_from_steps_without_drafts() -> None:
    """A step without drafts takes a hundred times as long as at launch."""
    policy = Adaptive((1, 8), step_cost((1.0, 10.0), (1, 8)))
    policy.drafted.add("a")
    chosen = []
    for _ in range(40 * SETTLE):
        chosen.append(policy.decide(["a"]).width)
        policy.cost.observe(1, chosen[-1], 100.0 if chosen[-1] == 1 else 10.0)
    assert set(chosen[:2]) == {1}
    assert chosen[-1] == 8


def test_rest_factors_stay_one_with_one_kind_of_draft() -> None:
    for rested in (False, True):
        rhythm = Rhythm()
        for _ in range(100):
            rhythm.observe(rested, accepted=1.0, expected=4.0)
        np.testing.assert_allclose(rhythm.factors(), 1.0, rtol=0.02)


def test_rest_factors_are_accepted_over_expected() -> None:
    rhythm = Rhythm()
    for _ in range(2500):
        for rested, accepted in ((False, 2.0), (True, 6.0)):
            rhythm.observe(rested, accepted, expected=4.0)
    after_draft, after_rest = rhythm.factors()
    assert 0.5 <= after_draft < 0.75
    assert 1.25 < after_rest <= 1.5


def clustered(policy: Adaptive, n_tokens: int, seconds_W: Sequence[float]) -> tuple[float, Counter[int]]:
    """Return one request's tokens per second and the number of steps at each width.

    All drafts are accepted, except those of steps that begin within four tokens after a step with drafts.
    """
    seconds, place, hard_until, widths = 0.0, 0, 0, Counter[int]()
    while place < n_tokens:
        decision = policy.decide(["a"])
        width = decision.width
        n_accepted = width - 1 if place >= hard_until else 0
        policy.observe(["a"], decision, [n_accepted])
        place += n_accepted + 1
        hard_until = place + 4 if width > 1 else hard_until
        seconds += seconds_W[WIDTHS.index(width)]
        widths[width] += 1
    return place / seconds, widths


def test_drafts_rest_where_consecutive_ones_fail() -> None:
    """A step without drafts takes 1 s, a step with drafts 4 s. The best cycle commits 14 tokens in 10 s.

    It is 6 steps (`REST`) without drafts, then one accepted block of 8.
    """
    seconds_W = (1.0, 4.0, 4.0, 4.0)
    policy = Adaptive(WIDTHS, step_cost(seconds_W))
    clustered(policy, 4000, seconds_W)
    rate, widths = clustered(policy, 4000, seconds_W)
    assert rate > 1.3
    assert widths[1] / widths[8] == pytest.approx(REST, rel=0.2)


def test_drafts_never_rest_without_width_one() -> None:
    """A rest is steps of width 1, so without width 1 even a large benefit of a rest is ignored."""
    for widths, rests in ((WIDTHS, True), (WIDTHS[1:], False)):
        policy = Adaptive(widths, step_cost((1.0, 1.0, 4.0, 4.0)[-len(widths) :], widths))
        policy.acceptance = Certain(committed(0.9))
        for rested, accepted in ((False, 0.0), (True, 4.0)) * 1000:
            policy.rhythm.observe(rested, accepted, expected=2.0)
        assert (set(widths_of(policy, 100)) == {1, 8}) is rests
        assert (policy.review.rest == REST) is rests


def rhythmic(committed_N: Sequence[float]) -> Adaptive:
    """Return a policy that expects half the mean acceptance right after a draft, and 1.5 times as much after a rest."""
    policy = adaptive(committed_N, (1.0, 4.0, 4.0, 4.0))
    policy.rhythm.factors = lambda: [0.5, 1.5]
    return policy


def test_exploring_drafts_do_not_rest() -> None:
    """A look directly follows another step with drafts, and the next rest has its full length."""
    policy = rhythmic(range(1, N + 1))
    widths = widths_of(policy, 3000)
    drafts = [i for i, width in enumerate(widths) if width > 1]
    assert Counter(np.diff(drafts) - 1).keys() == {0, REST}


def test_a_rested_draft_commits_no_more_than_its_width() -> None:
    """On average all seven drafts are accepted. After a rest 1.5 times as many are expected, limited to seven."""
    policy = rhythmic(range(1, N + 1))
    drafts = {decision for decision in (policy.decide(["a"]) for _ in range(3000)) if decision.width > 1}
    assert drafts == {Decision(8, 8.0, 7.0, rested=True), Decision(8, 1 + 7 / 2, 7.0, rested=False)}
    seen = list[tuple[float, float]]()
    policy.rhythm.observe = lambda rested, accepted, expected: seen.append((accepted, expected))
    for decision in drafts:
        policy.observe(["a", "b"], decision, [7, 2])
    assert seen == [(4.5, 7.0)] * 2, "factors are measured against the expectation without factors"


def test_exploring_drafts_are_rested_where_nothing_is_drafted() -> None:
    """On average 0.4 of seven drafts are accepted, and 0.6 after a rest: not worth a step of 4 s.

    So only looks draft, and they expect the acceptance after a rest.
    """
    policy = rhythmic([1, *[1.4] * D])
    (look,) = {decision for decision in (policy.decide(["a"]) for _ in range(1000)) if decision.width > 1}
    assert look == (8, pytest.approx(1.6), pytest.approx(0.4), True)
