"""The width policy replayed: what a replay counts, how a change is followed, and the bar at published points."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from launch import simulate_width, width_replay
from launch.published import (
    BLOCK,
    CARDS,
    CONCURRENCIES,
    NARROW,
    QWEN35_27B,
    Card,
    Task,
    acceptance_curve,
    committed,
    published_seconds,
    shared_seconds,
    step_seconds,
)
from launch.simulate_width import Drawn, simulate
from launch.width_replay import WIDTHS, Answer, Run, answers, mostly, pooled, replay, shares
from sglang_dflash.width.chooser import Chooser
from sglang_dflash.width.cost import StepCost
from sglang_dflash.width.policy import Adaptive, Policy

TASKS = [pytest.param(task, id=f"{card.name}-{task.name}") for card in CARDS for task in card.tasks]
SECONDS_CW = step_seconds(shared_seconds(QWEN35_27B), WIDTHS)
EASY_D, HOPELESS_D = acceptance_curve(6.34, 9.18), np.full(BLOCK - 1, 0.1)
FOLLOWS_WITHIN = (150, 150, 150, 200)  # steps on the mean, by concurrency; at 32 requests looks are some 300 apart
SETTLED, NEAR = 10, 0.02  # steps in a row, all but one at a width within this share of the best rate

# ------------------------------------------------------------------------------------------------------------- replays


def test_a_fixed_width_replayed_by_hand() -> None:
    """Two answers whose places accept 3, 0, 1, 0, 0, 0, ... drafts; at width 3 at most two."""
    requests = (Answer(f"{i}", [3, 0, 1, 0, 0, 0, 0]) for i in count())
    chooser = Chooser(Policy("always 3", [3]))
    run = replay(chooser, {3: 0.25}, requests, 2, 12, seed=0)
    assert run == Run([3, 3, 3, 3], 2 * (3 + 1 + 1 + 1), 4 * 0.25)
    assert chooser.describe()["committed"] == 2 * (3 + 1 + 1), "the last outcome is a step late"


def test_a_request_that_is_done_makes_way() -> None:
    asked = list[int]()

    def requests() -> Iterator[Answer]:
        for number in count():
            asked.append(number)
            yield Answer(str(number), [15] * 33)

    chooser = Chooser(Policy("always 16", [16]))
    replay(chooser, {16: 1.0}, requests(), 2, 2 * 16 * 5, seed=0)
    assert asked == list(range(2 + 2 * 2))  # after two blocks each
    assert chooser.epoch == 4, "a prompt is read for each"


def simulated(curve_D: np.ndarray, c: int, seed: int = 0) -> Run:
    return simulate(curve_D, SECONDS_CW, SECONDS_CW, c, tokens=2000, seed=seed)


def test_a_simulation_repeats_itself() -> None:
    one, same, other = (simulated(acceptance_curve(4.54, 5.47), 0, seed) for seed in (0, 0, 1))
    assert one == same
    assert one.widths != other.widths


def test_certain_drafts_are_all_verified() -> None:
    run = simulated(np.ones(BLOCK - 1), 1)
    assert shares([run]) == {"16": 1.0}
    assert run.tokens == len(run.widths) * 8 * BLOCK


def test_counts_arrive_a_step_late() -> None:
    """Nothing is accepted: the first two steps are chosen before that is known."""
    run = simulated(np.zeros(BLOCK - 1), 3)
    assert run.widths[:2] == [16, 16]
    assert run.widths[2] == 1


def test_texts_follow_one_another() -> None:
    texts = {kind: [[0]] for kind in ("easy", "hard", "hopeless")}
    asked = [request.rid.split("-")[0] for request, _ in zip(answers(texts, "changing", 0), range(100), strict=False)]
    assert asked == ["easy"] * 24 + ["hopeless"] * 24 + ["easy"] * 24 + ["hard"] * 24 + ["easy"] * 4


def test_shares_and_rates() -> None:
    runs = [Run([16, 16, 1], 30.0, 2.0), Run([16] * 37, 10.0, 2.0)]
    assert pooled(runs) == 10.0
    assert shares(runs) == {"1": 0.025, "16": 0.975}
    assert mostly(shares(runs)) == "16: 98%"


@pytest.mark.full
def test_the_pairs_own_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read by the model once; on the mean the policy is near the best fixed width or above."""
    few = ["--texts", str(tmp_path / "texts.json"), "--num-prompts", "2", "--tokens", "600", "--seeds", "1"]
    for _ in range(2):
        width_replay.main(few)
    first, again = capsys.readouterr().out.split("| text |")[1:]
    assert first == again
    texts = json.loads((tmp_path / "texts.json").read_text())
    assert {kind: len(answers) for kind, answers in texts.items()} == {"easy": 2, "hard": 2, "hopeless": 2}
    assert sum(texts["easy"][0]) > sum(texts["hopeless"][0])
    rows = [line.split(" | ") for line in first.splitlines()[2:17]]
    assert [(row[0], row[1]) for row in rows[:3]] == [("| easy", "1"), ("| easy", "4"), ("| easy", "16")]
    assert np.mean([float(row[2]) for row in rows]) > 0.97


# ------------------------------------------------------------------------------------------------- following a change


KINDS = [Drawn("", curve_D, np.random.default_rng(0)) for curve_D in (EASY_D, HOPELESS_D, EASY_D)]
CHANGES = 2000, 3000  # tokens per place in the batch


class Reading(Drawn):
    """One of several requests whose text changes at once; `phases`: those of all their steps so far, in tokens said."""

    def __init__(self, rid: str, random: np.random.Generator, phases: list[tuple[int, int]], n: int) -> None:
        super().__init__(rid, EASY_D, random)
        self.phases, self.n = phases, n

    def step(self, width: int) -> tuple[int, float]:
        n_said = self.phases[-1][1] if self.phases else 0
        phase = sum(n_said >= tokens * self.n for tokens in CHANGES)
        self.fails_D, self.committed_N = KINDS[phase].fails_D, KINDS[phase].committed_N
        n_accepted, tokens = super().step(width)
        self.phases.append((phase, n_said + n_accepted + 1))
        return n_accepted, tokens


def changed(c: int, seed: int) -> tuple[list[int | None], float]:
    """Steps until the policy has followed, at the start and after each change; its rate over that of the best width."""
    n, phases, random = CONCURRENCIES[c], list[tuple[int, int]](), np.random.default_rng(seed)
    requests = (Reading(f"request-{number}", random, phases, n) for number in count())
    cost = StepCost(WIDTHS, dict(zip(CONCURRENCIES, SECONDS_CW, strict=True)), lambda seconds_SW: None)
    seconds = dict(zip(WIDTHS, SECONDS_CW[c].tolist(), strict=True))
    run = replay(Chooser(Adaptive(WIDTHS, cost)), seconds, requests, n, 6000 * n, seed=seed)
    by_phase = [[w for w, (phase, _) in zip(run.widths, phases[::n], strict=True) if phase == i] for i in range(3)]
    easy_W, hopeless_W = rates(c, EASY_D), rates(c, HOPELESS_D)
    right = [rate_W >= (1 - NEAR) * rate_W.max() for rate_W in (easy_W, hopeless_W, easy_W)]
    return list(map(settled, by_phase, right)), pooled([run]) / (6 / (5 / easy_W + 1 / hopeless_W)).max()


def rates(c: int, curve_D: np.ndarray) -> np.ndarray:
    """Tokens per second at every fixed width."""
    return CONCURRENCIES[c] * committed(curve_D)[np.array(WIDTHS) - 1] / SECONDS_CW[c]


def settled(widths: list[int], right_W: np.ndarray) -> int | None:
    """Steps until the right widths are chosen; None where they never are."""
    is_right = [right_W[WIDTHS.index(width)] for width in widths]
    found = (i for i in range(len(widths) - SETTLED + 1) if sum(is_right[i : i + SETTLED]) >= SETTLED - 1)
    return next(found, None)


def test_settled_counts_steps_to_the_right_widths() -> None:
    right_W = np.array(WIDTHS) == 1
    assert settled([1] * 20, right_W) == 0
    assert settled([16] * 7 + [1] * 20, right_W) == 6
    assert settled([16] * 20 + [1] * 3, right_W) is None


@pytest.mark.parametrize("c", range(len(CONCURRENCIES)))
def test_the_policy_follows_a_change(c: int) -> None:
    steps, over_best = zip(*(changed(c, seed) for seed in range(8)), strict=True)
    assert (np.array(steps, dtype=float).mean(axis=0) <= FOLLOWS_WITHIN[c]).all()  # nan: it never did
    assert np.mean(over_best) > 1.1


@pytest.mark.parametrize("c", range(len(CONCURRENCIES)))
def test_hopeless_drafts_cost_next_to_nothing(c: int) -> None:
    run = simulate(HOPELESS_D, SECONDS_CW, SECONDS_CW, c, tokens=1000, seed=0)
    assert pooled([run]) / rates(c, HOPELESS_D)[0] >= 0.97


# ---------------------------------------------------------------------------------------------------- published points


@pytest.mark.parametrize("task", TASKS)
def test_fits_reproduce_what_is_published(task: Task) -> None:
    """A static width of 1, 8 and 16 has the throughput of AR and of the two columns; other widths lie between."""
    curve_D = acceptance_curve(task.narrow_length, task.block_length)
    assert committed(curve_D)[[NARROW - 1, BLOCK - 1]] == pytest.approx([task.narrow_length, task.block_length])
    seconds_CW = step_seconds(published_seconds(task), WIDTHS)
    assert (np.diff(seconds_CW, axis=1) > 0).all()
    for c, n in enumerate(CONCURRENCIES):
        rate_W = n * committed(curve_D)[np.array(WIDTHS) - 1] / seconds_CW[c]
        shown = [rate_W[WIDTHS.index(width)] for width in (1, NARROW, BLOCK)]
        assert shown == pytest.approx([task.off[c], task.narrow[c], task.block[c]])


def test_lengths_that_no_curve_gives_are_refused() -> None:
    with pytest.raises(ValueError, match="no curve"):
        acceptance_curve(5.0, 4.9)


def test_step_times_between_the_known_ones() -> None:
    """Drafting makes width 2 dearer than the line from 1 to 8 says; a share of it is not saved at narrower widths."""
    known_C3 = np.array([(10.0, 18.0, 20.0), (10.0, 18.0, 34.0)])
    np.testing.assert_allclose(step_seconds(known_C3, (1, 2, 4, 8, 12, 16))[0], [10, 16.5, 17, 18, 19, 20])
    np.testing.assert_allclose(step_seconds(known_C3, (1, 8, 12, 16))[1], [10, 18, 26, 34])
    np.testing.assert_allclose(step_seconds(known_C3, (1, 8, 12, 16), 0.1)[1], [10, 19.6, 26.8, 34])


@pytest.mark.parametrize("c", range(len(CONCURRENCIES)))
@pytest.mark.parametrize(("card", "task"), [(CARDS[0], 0), (CARDS[0], 4), (CARDS[1], 1), (CARDS[1], 5)])
def test_the_bar_at_published_points(card: Card, task: int, c: int) -> None:
    """Of all points the ones furthest apart; `python -m launch.simulate_width` computes the rest."""
    row = simulate_width.point(card, card.tasks[task], c, tokens=3600, seeds=4)
    for launch in simulate_width.LAUNCHES:
        assert row[launch]["over_better"] >= 0.98
        assert row[launch]["over_off"] >= 1.0


def test_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate_width.main(["--tokens", "100", "--seeds", "1", "--output", str(tmp_path / "width.json")])
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == str(tmp_path / "width.json")
    assert (tmp_path / "width.png").stat().st_size > 10_000
    text = (tmp_path / "width.json").read_text()
    assert str(tmp_path) not in text
    document = json.loads(text)
    assert document["level"].startswith("P")
    assert len(document["points"]) == len(TASKS) * len(CONCURRENCIES)
    assert sum(line.count("|") == 12 for line in shown) == 2 + len(document["points"])
    for row in document["points"]:
        residuals = next(fit for fit in document["fits"] if fit["card"] == row["card"])["tasks"][row["task"]]
        assert len(residuals["residual_percent"][str(row["concurrency"])]) == 3
