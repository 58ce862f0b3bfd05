"""The width policy: what it believes, what it takes a step to cost, and what it makes of both."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width import acceptance as beliefs
from sglang_dflash.width.acceptance import ALL_DECAY, DECAY, WARM_UP, Acceptance, Counts, Own, odds
from sglang_dflash.width.cost import StepCost
from sglang_dflash.width.policy import EARLY, EXPLORE, REST, SETTLE, Adaptive, Decision, Rhythm

N = 8  # block
D = N - 1
WIDTHS = (1, 2, 4, 8)
RIDS = ("a", "b", "c", "d", "e")
MEMORY = 32  # steps, of an observation

Step = tuple[list[str], int, list[int]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Requests, a width, and how many of its drafts were accepted."""
    rids = draw(st.lists(st.sampled_from(RIDS), min_size=1, unique=True))
    width = draw(st.sampled_from(WIDTHS))
    return rids, width, [draw(st.integers(0, width - 1)) for _ in rids]


def taught(history: Sequence[Step]) -> Acceptance:
    """Requests that every other one learns from at once, because they are longer than a server's own."""
    acceptance = Acceptance(D)
    for step in history:
        for rid in step[0]:
            acceptance.of_request.setdefault(rid, Own(acceptance.nothing)).kept = None
        acceptance.observe(*step)
    return acceptance


def now(weight: float, counts: Counts) -> np.ndarray:
    """Reached and accepted, an observation of the last step being 1."""
    return np.array(counts).T / weight


def conditional(acceptance: Acceptance, rid: str) -> np.ndarray:
    """The believed acceptance of every draft, given those before it."""
    survival_D = np.diff(acceptance.expected([rid]))[1:]
    return survival_D / np.concatenate(([1.0], survival_D[:-1]))


def alone(seconds_SW: np.ndarray) -> None:
    """One rank agrees with itself."""


def step_cost(seconds_W: Sequence[float], widths: Sequence[int] = WIDTHS) -> StepCost:
    return StepCost(widths, {1: seconds_W}, alone)


# ---------------------------------------------------------------------------------------------------------- acceptance


@given(st.lists(steps(), max_size=30), steps())
def test_expected_is_between_one_and_the_width_and_gains_less_and_less(history: list[Step], last: Step) -> None:
    expected_N = taught(history).expected(last[0])
    assert expected_N[:2] == [0, 1]
    assert (expected_N <= np.arange(N + 1) + 1e-9).all()
    gains_N = np.diff(expected_N)
    assert (gains_N >= 0).all()
    assert (np.diff(gains_N) <= 1e-9).all()


@given(st.lists(steps(), max_size=10), st.integers(1, 5), st.sampled_from(WIDTHS[:-1]))
def test_what_was_not_verified_did_not_fail(history: list[Step], n: int, width: int) -> None:
    """Steps that accept all they verify never lower the belief in what is beyond to below that in the last verified."""
    acceptance = taught([*history, (list(RIDS), 1, [0] * len(RIDS))])
    before_2D = now(acceptance.all_weight, acceptance.batch)
    for _ in range(n):
        acceptance.observe(RIDS, width, [width - 1] * len(RIDS))
    after_2D = now(acceptance.all_weight, acceptance.batch)
    np.testing.assert_allclose(after_2D[:, width - 1 :], before_2D[:, width - 1 :] * ALL_DECAY**n)
    assert (after_2D[:, : width - 1] >= before_2D[:, : width - 1] * ALL_DECAY**n).all()


def test_belief_in_the_unseen_is_that_in_the_position_before() -> None:
    acceptance = taught([(["a"], 4, [3])] * 50 + [(["a"], 4, [2])] * 50)
    conditional_D = conditional(acceptance, "new")
    assert conditional_D[2] < 0.5 < 0.9 < conditional_D[1]  # the third was seen to fail, the second was not
    np.testing.assert_allclose(conditional_D[3:], conditional_D[2])


def test_belief_in_what_was_seen_before_is_what_was_seen() -> None:
    """Half the steps accept nothing, the others all; then the first fails. The later ones are still trusted."""
    acceptance = taught([(["a"], N, [0]), (["a"], N, [D])] * 50 + [(["a"], 2, [0])] * 10 * MEMORY)
    conditional_D = conditional(acceptance, "new")
    assert conditional_D[0] < 0.1
    assert (conditional_D[1:] > 0.9).all()


def test_a_failure_ends_what_a_step_says() -> None:
    acceptance = taught([(["a", "b"], N, [0, 3])])
    reached_accepted_2D = now(acceptance.all_weight, acceptance.batch).tolist()
    assert reached_accepted_2D == [[2, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]]


def test_a_request_is_drawn_to_the_others() -> None:
    """Four observations pull a request, two drafts its own level; a new one is believed to be like the others.

    Of two drafts one was accepted, where 1 was believed: first (1 + 4) / (1 + 4) = 1, then, with a tiny fading and that
    for the last belief, (1 + 4) / (2 + 4) = 5/6 and (1 + 4 * 5/6) / (2 + 4) = 13/18.
    """
    acceptance = taught([(["a", "b"], 2, [1, 0])])
    believed = {rid: acceptance.expected([rid])[2] - 1 for rid in ("a", "b", "new")}
    usual = 13 / 18
    for rid, accepted in (("a", 1), ("b", 0)):
        level = odds((accepted + 2) / 3) / odds(1)  # 1 was usual
        there = level * odds(usual) / (1 + level * odds(usual))
        assert believed[rid] == pytest.approx((accepted + 4 * there) / 5)
    assert believed["new"] == pytest.approx(usual)
    each = [acceptance.expected([rid]) for rid in ("a", "b")]
    np.testing.assert_allclose(acceptance.expected(["a", "b"]), np.mean(each, axis=0))


def test_a_block_that_fails_at_once_says_nothing_of_one_that_does_not() -> None:
    acceptance = taught([([f"good-{i}"], N, [D]) for i in range(50)])
    usual_D = conditional(acceptance, "new")
    for _ in range(5):
        acceptance.observe(["a"], N, [0])
    believed_D = conditional(acceptance, "a")
    assert believed_D[0] < 0.5 * usual_D[0]
    np.testing.assert_allclose(believed_D[1:], usual_D[1:], rtol=0.05)


def test_one_look_tells_a_good_request_from_bad_ones() -> None:
    """After a hundred requests that accept nothing, one that accepts everything once is expected to do so again."""
    acceptance = taught([([f"bad-{i}"], N, [0]) for i in range(100)])
    assert acceptance.expected(["good"])[N] < 1.1
    acceptance.observe(["good"], N, [D])
    assert acceptance.expected(["good"])[N] > 2
    acceptance.observe(["good"], N, [D])
    assert acceptance.expected(["good"])[N] > 4


def test_the_last_request_does_not_decide_what_is_believed_of_the_next() -> None:
    good = [([f"good-{i}"], N, [D]) for i in range(100)]
    before, after = taught(good), taught([*good, *[(["bad"], N, [0])] * 5])
    assert after.expected(["new"])[N] > 0.9 * before.expected(["new"])[N]


def test_what_a_server_asks_itself_teaches_nothing() -> None:
    acceptance = Acceptance(D)
    fresh_N = acceptance.expected(["new"])
    for _ in range(WARM_UP):
        acceptance.observe(["warm-up"], N, [0])
    assert acceptance.expected(["new"]) == fresh_N
    acceptance.observe(["warm-up"], N, [0])
    assert acceptance.expected(["new"])[N] < 0.5 * fresh_N[N], "all nine steps are known now"


def test_it_forgets() -> None:
    """After `MEMORY` steps a request's observation weighs 1/e, whether or not they draft and whose they are."""
    drafted_once = taught([(["a"], N, [7])] + [(["a"], 1, [0])] * MEMORY)
    others = taught([(["a"], N, [7])] + [(["b"], N, [7])] * MEMORY)
    for acceptance in (drafted_once, others):
        np.testing.assert_allclose(now(acceptance.weight, acceptance.of_request["a"].counts), np.exp(-1))
    np.testing.assert_allclose(now(drafted_once.all_weight, drafted_once.batch), ALL_DECAY**MEMORY)


def test_weights_never_outgrow_a_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made light again or not, what is believed is the same."""
    history = [(["a", "b"], N, [7, i % N]) for i in range(50)] + [(["a"], 1, [0])] * 50
    heavy = taught(history)
    monkeypatch.setattr(beliefs, "HEAVY", 3.0)
    light = taught(history)
    assert light.weight < 3 < heavy.weight
    np.testing.assert_allclose(light.expected(["a", "b"]), heavy.expected(["a", "b"]))


def test_of_requests_that_end_hardly_any_are_remembered() -> None:
    acceptance = taught([([f"request-{i}", "stays"], N, [7, i % N]) for i in range(1000)])
    assert len(acceptance.of_request) < 100
    stays = now(acceptance.weight, acceptance.of_request["stays"].counts)
    assert stays[0, 0] == pytest.approx(1 / (1 - DECAY), rel=0.01), "nothing is lost of it"
    np.testing.assert_array_equal(acceptance.expected(["request-1"]), acceptance.expected(["never seen"]))


def test_a_large_batch_is_forgotten_as_fast_as_a_small_one() -> None:
    """Requests accept everything, many at once or one; then one after another accepts nothing."""
    n_steps = []
    for n_requests in (1, 16):
        rids = [str(i) for i in range(n_requests)]
        acceptance = taught([(rids, N, [D] * n_requests)] * 4 * round(1 / (1 - ALL_DECAY)))
        n_steps.append(0)
        while acceptance.expected(["new"])[-1] > 2:
            acceptance.observe([f"bad-{n_steps[-1] // 20}"], N, [0])
            n_steps[-1] += 1
    assert n_steps[1] <= 1.1 * n_steps[0]


# --------------------------------------------------------------------------------------------------------------- costs


def make_cost() -> StepCost:
    return StepCost((1, 4, 8), {2: (1.0, 2.0, 3.0), 4: (2.0, 6.0, 5.0), 8: (3.0, 7.0, 9.0)}, alone)


@pytest.mark.parametrize(
    ("n_requests", "seconds"), [(1, [1, 2, 3]), (3, [1.5, 4, 4]), (4, [2, 6, 5]), (5, [2.25, 6.25, 6]), (99, [3, 7, 9])]
)
def test_costs_between_measured_sizes(n_requests: int, seconds: list[float]) -> None:
    np.testing.assert_allclose(make_cost().of(n_requests), seconds)


@given(st.integers(1, 10), st.sampled_from((1, 4, 8)), st.floats(0.1, 5.0))
def test_costs_become_what_steps_took(n_requests: int, width: int, real: float) -> None:
    """And the share by which one width took too long, most of the others will have too."""
    cost = make_cost()
    w, before_W = cost.widths.index(width), cost.of(n_requests)
    for _ in range(1000):
        cost.observe(n_requests, width, real)
    assert cost.of(n_requests) == before_W, "not before the ranks have agreed"
    cost.settle()
    assert cost.of(n_requests)[w] == pytest.approx(real, rel=1e-3)
    if n_requests not in cost.sizes:  # between two sizes, each of which has its own shares
        return
    moved_W = np.log(np.array(cost.of(n_requests)) / before_W)
    others_W = np.delete(moved_W, w)
    np.testing.assert_allclose(others_W, others_W[0], atol=1e-12)
    assert 0.5 * abs(moved_W[w]) <= abs(others_W[0]) <= abs(moved_W[w])


def test_other_batch_sizes_keep_their_costs() -> None:
    """Three requests took 4.4 s for 4: a tenth more. Half of that is said of either size beside them, of which a tenth
    counts for all widths, and 3 % for width 4 besides."""
    cost = make_cost()
    cost.observe(3, 4, 4.4)
    cost.settle()
    np.testing.assert_allclose(cost.of(8), [3, 7, 9])
    np.testing.assert_allclose(cost.of(2), [1.005, 1.005 * 1.0015 * 2, 1.005 * 3])
    np.testing.assert_allclose(cost.of(4), [1.005 * 2, 1.005 * 1.0015 * 6, 1.005 * 5])


SLOWER = [(4, seconds) for seconds in (2.0, 4.0, 2.0) for _ in range(200)]
TAUGHT: dict[str, tuple[Sequence[float], list[tuple[int, float]], list[float], dict[str, float]]] = {
    # Launch saw every width alike; width 4 really takes twice as long, which steps at all widths show.
    "a width of its own cost": ((1, 1, 1), [(1, 1.0), (4, 2.0), (8, 1.0)] * 1000, [1, 2, 1], {"atol": 0.15}),
    # Every step takes twice as long as at launch; width 8 takes another second that launch missed.
    "what launch got wrong": ((1, 2, 2), [*[(4, 4.0)] * 8, (8, 5.0)] * 100, [2, 4, 5], {"rtol": 0.1}),
    "a machine that was slower": (
        (1, 2, 3),
        [(4, 2.0 * f) for f in (1, 2, 1) for _ in range(200)],
        [1, 2, 3],
        {"atol": 0.1},
    ),
}


@pytest.mark.parametrize("case", TAUGHT)
def test_what_is_particular_to_a_width_is_told_from_what_is_not(case):
    launch, steps_taken, learned, tolerance = TAUGHT[case]
    cost = step_cost(launch, (1, 4, 8))
    for width, seconds in steps_taken:
        cost.observe(1, width, seconds)
    cost.settle()
    np.testing.assert_allclose(cost.of(1), learned, **({"rtol": 1e-7} | tolerance))


@pytest.mark.parametrize(("seconds", "error"), [((50.0, 500.0), 0.15), ((0.5, 0.0), -0.15)])
def test_of_a_disturbed_step_only_so_much_counts(seconds: tuple[float, float], error: float) -> None:
    """One step that was interrupted, or timed too late, hardly moves what is believed: 15 % of 5 s count."""
    for disturbed in seconds:
        cost = make_cost()
        cost.observe(4, 8, disturbed)
        cost.settle()
        common = 1 + 0.1 * error
        np.testing.assert_allclose(cost.of(4), [common * 2, common * 6, common * (1 + 0.03 * error) * 5])


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_wrong_launch_is_forgotten_within_32_steps(factor: float) -> None:
    """Launch measured on a machine that was busy, or one that is busy now; some steps are disturbed besides."""
    policy = Adaptive(WIDTHS, step_cost([factor * s for s in (1.0, 1.6, 2.4, 4.0)]))
    for step in range(32):
        policy.decide(["a"])
        policy.cost.observe(1, 1, 10.0 if step % 4 == 2 else 1.0)
    policy.decide(["a"])
    np.testing.assert_allclose(policy.cost.of(1)[0], 1.0, rtol=0.25)


# --------------------------------------------------------------------------------------------------------- the choice


class Certain(Acceptance):
    """Believes what it is told to."""

    def __init__(self, committed_N: Sequence[float]) -> None:
        super().__init__(D)
        self.committed_N = [0.0, *committed_N]

    def expected(self, rids: Sequence[str]) -> list[float]:
        return self.committed_N


def widths_of(policy: Adaptive, n_steps: int) -> list[int]:
    """What is decided for one request, of which nothing is learned."""
    return [policy.decide(["a"]).width for _ in range(n_steps)]


def committed(conditional: float) -> list[float]:
    return [sum(conditional**i for i in range(width)) for width in range(1, N + 1)]


costs = st.lists(st.floats(0.5, 8.0), min_size=len(WIDTHS), max_size=len(WIDTHS))


def adaptive(committed_N: Sequence[float], seconds_W: Sequence[float]) -> Adaptive:
    policy = Adaptive(WIDTHS, step_cost(seconds_W))
    policy.acceptance = Certain(committed_N)
    policy.drafted.update(("a", "another"))  # neither is new, which would be a reason to look
    return policy


@given(st.floats(0.05, 0.99), costs)
def test_the_best_of_all_widths_is_taken(conditional: float, seconds_W: list[float]) -> None:
    """On any cost, stairs or not, the first choice has the highest rate, unless it looks for nearly nothing."""
    committed_N = committed(conditional)
    rate_W = [committed_N[width - 1] / seconds for width, seconds in zip(WIDTHS, seconds_W, strict=True)]
    chosen = WIDTHS.index(adaptive(committed_N, seconds_W).decide(["a"]).width)
    assert rate_W[chosen] >= max(rate_W) * (1 - 2 * EXPLORE) or chosen == len(WIDTHS) - 1
    if chosen != len(WIDTHS) - 1:
        assert rate_W[chosen] == max(rate_W)


def test_a_worse_neighbour_hides_nothing() -> None:
    """Width 4 is not worth its step up, width 8 is: it lies on the same stair."""
    assert adaptive(committed(0.6), (1.0, 1.1, 3.0, 3.0)).decide(["a"]).width == 2
    assert adaptive(committed(0.98), (1.0, 1.1, 3.0, 3.0)).decide(["a"]).width == 8


def test_of_equals_the_widest_is_taken() -> None:
    for seconds_W, widest in (((1, 2, 4, 8), 8), ((9, 2, 4, 80), 4)):
        policy = adaptive(range(1, N + 1), seconds_W)
        assert widths_of(policy, 100) == [widest] * 100


@given(st.floats(0.0, 0.99), costs)
def test_looking_costs_at_most_a_share_of_the_time(conditional: float, seconds_W: list[float]) -> None:
    committed_N = committed(conditional)
    policy = adaptive(committed_N, seconds_W)
    chosen = [WIDTHS.index(policy.decide(["a"]).width) for _ in range(1000)]
    seconds = sum(seconds_W[w] for w in chosen)
    best = max(committed_N[width - 1] / seconds_W[w] for w, width in enumerate(WIDTHS))
    lost = seconds - sum(committed_N[WIDTHS[w] - 1] for w in chosen) / best
    assert lost <= EXPLORE * seconds + 1e-6


def test_nothing_is_spent_where_nothing_can_be_won() -> None:
    """Of a thousand steps one accepts all of width 4: even certainty beyond would not pay for a longer step."""
    policy = adaptive(committed(0.1), (9.0, 9.0, 1.0, 1.8))
    assert set(widths_of(policy, 5000)) == {4}
    hopeful = adaptive(committed(0.9), (9.0, 9.0, 1.0, 1.8))
    assert set(widths_of(hopeful, 5000)) == {4, 8}


def test_at_most_one_block_is_saved_for_looks() -> None:
    """A look is nearly free for long: more is saved than spent. When it costs 0.5 s, the 1.5 s of a block buy three."""
    policy = adaptive([1, 2, 3, 4, 4.5, 5, 5.5, 5.9999], (9.0, 9.0, 1.0, 1.5))
    assert set(widths_of(policy, 5000)) == {8}
    policy.acceptance = Certain([1, 2, 3, 4, 4, 4, 4, 4])
    chosen = [policy.decide(["another"]).width for _ in range(20)]
    assert chosen == [8] * 3 + [4] * 17


@given(st.lists(steps(), max_size=30))
def test_ranks_that_are_told_the_same_decide_the_same(history: list[Step]) -> None:
    ranks = [Adaptive(WIDTHS, step_cost((1, 2, 2.5, 4))) for _ in range(2)]
    for rids, _, n_accepted_B in history:
        decision, other = [rank.decide(rids) for rank in ranks]
        assert decision == other
        for rank in ranks:
            rank.observe(rids, decision, [min(n, decision.width - 1) for n in n_accepted_B])
    assert ranks[0].saved_s == ranks[1].saved_s


def test_ranks_with_clocks_of_their_own_decide_the_same() -> None:
    """As long as the first one's clock is what they agree on."""
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
    assert len({a for a, _ in chosen}) > 1, "nothing was decided"


@pytest.mark.parametrize(("n_requests", "n_looks"), [(1, 2), (8, 2)])
def test_it_follows(n_requests: int, n_looks: int) -> None:
    """Everything is accepted, then nothing, then everything: 64 steps down; up when so many looks were affordable."""
    down, look = 64, 1 + round((4 - 1) / EXPLORE)  # a look loses what width 8 takes longer than width 1
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


Rate = float  # of tokens, over what it is without speculation
CHEAP = (1.0, 1.3, 1.5, 2.0)


def served(
    policy: Adaptive, accept: Sequence[float], n_requests: int, n_tokens: int, seconds_W: Sequence[float]
) -> list[Rate]:
    """Serve groups of requests one after the other, each of one probability of acceptance; return their rates."""
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


def test_every_request_starts_with_a_look() -> None:
    """Also after hopeless ones: of 100 tokens a look costs one step here, and at most one more can be saved up for."""
    policy = Adaptive(WIDTHS, step_cost(CHEAP))
    assert min(served(policy, [0.0] * 20, 1, 100, CHEAP)[1:]) > 0.98
    assert policy.decide(["new"]).width == N
    assert policy.decide(["new"]).width == 1


@pytest.mark.parametrize("before", [[0.0], [0.0] * 50, [0.0, 1.0] * 10])
def test_an_easy_request_after_hopeless_ones_is_as_fast_as_asked_again(before: list[float]) -> None:
    *_, first, again = served(Adaptive(WIDTHS, step_cost(CHEAP)), [*before, 1.0, 1.0], 1, 87, CHEAP)
    assert first >= 0.9 * again


def test_a_batch_of_new_requests_looks_as_long_as_looks_are_paid_for() -> None:
    seconds_W = (1.0, 2.0, 3.0, 4.0)
    hopeless = served(Adaptive(WIDTHS, step_cost(seconds_W)), [0.0] * 40, 8, 100, seconds_W)
    assert np.mean(hopeless[4:]) >= 0.99 - 1e-3
    *_, easy, again = served(Adaptive(WIDTHS, step_cost(seconds_W)), [0.0] * 8 + [1.0] * 2, 8, 87, seconds_W)
    assert easy >= 0.8 * again


def test_what_was_learned_counts_at_the_next_step() -> None:
    policy = Adaptive(WIDTHS, step_cost((1.0, 1.6, 2.4, 4.0)))
    chosen = []
    for _ in range(SETTLE // 2):
        decision = policy.decide(["a"])
        chosen.append(decision.width)
        policy.observe(["a"], decision, [0])
    assert chosen[0] == 8
    assert chosen[-1] == 1


def test_what_steps_took_counts_where_nothing_is_drafted() -> None:
    """A step of one token turns out to take a hundred times as long as launch said."""
    policy = Adaptive((1, 8), step_cost((1.0, 10.0), (1, 8)))
    policy.drafted.add("a")
    chosen = []
    for _ in range(40 * SETTLE):
        chosen.append(policy.decide(["a"]).width)
        policy.cost.observe(1, 1, 100.0)
    assert set(chosen[: EARLY[0] - 1]) == {1}
    assert chosen[-1] == 8


# ------------------------------------------------------------------------------------------------------------- rests


def test_where_one_kind_of_draft_is_seen_rest_changes_nothing() -> None:
    for rested in (False, True):
        rhythm = Rhythm()
        for _ in range(100):
            rhythm.observe(rested, accepted=1.0, expected=4.0 * rhythm.factors()[rested])
        np.testing.assert_allclose(rhythm.factors(), 1.0, rtol=0.02)


def test_the_factor_is_what_was_accepted_of_what_was_expected() -> None:
    rhythm = Rhythm()
    for _ in range(2500):
        for rested, accepted in ((False, 2.0), (True, 6.0)):
            rhythm.observe(rested, accepted, expected=4.0 * rhythm.factors()[rested])
    after_draft, after_rest = rhythm.factors()
    assert 0.5 <= after_draft < 0.75
    assert 1.25 < after_rest <= 1.5


def clustered(policy: Adaptive, n_tokens: int, seconds_W: Sequence[float]) -> tuple[float, Counter[int]]:
    """Tokens per second of one request, and how often each width was chosen. A draft is accepted whole, but for the
    four places after a step that drafted, where it fails."""
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


def test_drafts_rest_where_they_fail_right_after_one_another() -> None:
    """A step of one token takes 1 s, a draft 4 s: `REST` such steps and a draft of eight commit 14 tokens in 10 s."""
    seconds_W = (1.0, 4.0, 4.0, 4.0)
    policy = Adaptive(WIDTHS, step_cost(seconds_W))
    clustered(policy, 4000, seconds_W)
    rate, widths = clustered(policy, 4000, seconds_W)
    assert rate > 1.3
    assert widths[1] / widths[8] == pytest.approx(REST, rel=0.2)


def test_without_width_one_nothing_rests() -> None:
    """However much a rest would help."""
    for widths, rests in ((WIDTHS, True), (WIDTHS[1:], False)):
        policy = Adaptive(widths, step_cost((1.0, 1.0, 4.0, 4.0)[-len(widths) :], widths))
        policy.acceptance = Certain(committed(0.9))
        for rested, accepted in ((False, 0.0), (True, 4.0)) * 1000:
            policy.rhythm.observe(rested, accepted, expected=2.0 * policy.rhythm.factors()[rested])
        assert (set(widths_of(policy, 100)) == {1, 8}) is rests
        assert (policy.review.rest == REST) is rests


def rhythmic(committed_N: Sequence[float]) -> Adaptive:
    """A draft after another is half as good as on the mean, one after a rest half as good again."""
    policy = adaptive(committed_N, (1.0, 4.0, 4.0, 4.0))
    policy.rhythm.factors = lambda: [0.5, 1.5]
    return policy


def test_where_drafts_rest_a_look_does_not() -> None:
    """It comes right after a draft, and changes nothing of the rest that follows."""
    policy = rhythmic(range(1, N + 1))
    widths = widths_of(policy, 3000)
    drafts = [i for i, width in enumerate(widths) if width > 1]
    assert Counter(np.diff(drafts) - 1).keys() == {0, REST}


def test_a_rested_draft_commits_no_more_than_its_width() -> None:
    """All seven drafts are accepted on the mean; half as many again are not there."""
    policy = rhythmic(range(1, N + 1))
    drafts = {decision for decision in (policy.decide(["a"]) for _ in range(3000)) if decision.width > 1}
    assert drafts == {Decision(8, 8.0, rested=True), Decision(8, 1 + 7 / 2, rested=False)}


def test_where_nothing_is_drafted_a_look_has_rested() -> None:
    """Of seven drafts 0.4 are accepted on the mean, after a rest 0.6, which is not worth 4 s."""
    policy = rhythmic([1, *[1.4] * D])
    (look,) = {decision for decision in (policy.decide(["a"]) for _ in range(1000)) if decision.width > 1}
    assert look == (8, pytest.approx(1.6), True)
