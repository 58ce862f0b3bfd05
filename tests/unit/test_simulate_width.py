"""The simulator of the width policy: its fits, its replay, and the bar at published points."""

import json
from pathlib import Path

import numpy as np
import pytest

from launch import plot_width, simulate_width
from launch.published import (
    BLOCK,
    CARDS,
    CONCURRENCIES,
    NARROW,
    Card,
    Task,
    acceptance_curve,
    committed,
    published_seconds,
    step_seconds,
)
from launch.replay_width import WIDTHS, Replay, Text, followed, histogram, replay, static
from launch.simulate_width import CURVES_KD, EASY, HOPELESS, TEXTS, believed_costs, runs_of

TASKS = [pytest.param(task, id=f"{card.name}-{task.name}") for card in CARDS for task in card.tasks]
FOLLOWS_WITHIN = (150, 150, 150, 200)  # steps on the mean, by concurrency; at 32 requests looks are some 300 apart


@pytest.mark.parametrize("task", TASKS)
def test_fits_reproduce_what_is_published(task: Task) -> None:
    """A static width of 1, 8 and 16 has the throughput of AR and of the two columns; other widths lie between."""
    text = Text(acceptance_curve(task.narrow_length, task.block_length)[None])
    assert committed(text.curves_KD[0])[[NARROW - 1, BLOCK - 1]] == pytest.approx(
        [task.narrow_length, task.block_length]
    )
    seconds_CW = step_seconds(published_seconds(task), WIDTHS)
    assert (np.diff(seconds_CW, axis=1) > 0).all()
    for c, n in enumerate(CONCURRENCIES):
        rate_W = static(text, seconds_CW[c], n, np.ones(1))
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


def replayed(text: Text, c: int, *, steps: int = 300, seed: int = 0) -> Replay:
    seconds_CW = step_seconds(published_seconds(CARDS[0].tasks[0]), WIDTHS)
    believed = believed_costs(seconds_CW)
    return replay(text, seconds_CW[c], believed, CONCURRENCIES[c], ends=lambda step, _: step >= steps, seed=seed)


def test_a_replay_repeats_itself() -> None:
    a, b, other = (replayed(TEXTS["middling"], 0, seed=seed) for seed in (0, 0, 1))
    assert a.widths == b.widths
    assert a.tokens_per_s == b.tokens_per_s
    assert a.widths != other.widths


def test_certain_drafts_are_all_verified() -> None:
    run = replayed(Text(np.ones((1, BLOCK - 1))), 1)
    assert histogram([run]) == {"16": 1.0}
    assert run.tokens_K.tolist() == [300 * 8 * BLOCK]


def test_counts_arrive_a_step_late() -> None:
    """Nothing is accepted: the first two steps are chosen before that is known."""
    run = replayed(Text(np.zeros((1, BLOCK - 1))), 3)
    assert run.widths[:2] == [16, 16]
    assert run.widths[2] == 1


def test_requests_come_and_go() -> None:
    asked: set[int] = set()

    def kind(number: int, tokens: float) -> int:
        asked.add(number)
        return 0

    replayed(Text(np.ones((1, BLOCK - 1)), kind), 1, steps=600)
    assert len(asked) > 24  # 600 steps of 16 tokens are several answers at each of 8 places
    assert asked == set(range(len(asked)))


def test_static_widths_do_the_same_work() -> None:
    """Half the tokens are of a kind that commits 1 a step, half of one that commits 16."""
    text = Text(np.array([np.zeros(BLOCK - 1), np.ones(BLOCK - 1)]))
    rate_W = static(text, np.full(len(WIDTHS), 2.0), 4, np.array([160.0, 160.0]))
    assert rate_W[0] == pytest.approx(4 / 2)
    assert rate_W[-1] == pytest.approx(320 / ((160 + 10) / 4 * 2))


def test_followed_counts_steps_to_the_right_widths() -> None:
    text = Text(CURVES_KD)
    seconds_W = np.linspace(1.0, 2.0, len(WIDTHS))  # easy: 16; hopeless: 1
    widths = [16] * 20 + [16] * 7 + [1] * 20 + [1] * 3
    kinds = [EASY] * 20 + [HOPELESS] * 27 + [EASY] * 3
    assert followed(text, seconds_W, Replay(widths, kinds, np.ones(3), 1.0)) == [0, 6, None]


@pytest.mark.parametrize("c", range(len(CONCURRENCIES)))
def test_the_policy_follows_a_change(c: int) -> None:
    row = simulate_width.made_up("easy, hopeless, easy", c, steps=0, seeds=8)
    mean_by_phase = np.array(row["steps_to_follow"], dtype=float).mean(axis=0)  # nan: it never did
    assert (mean_by_phase <= FOLLOWS_WITHIN[c]).all()
    assert row["over_best_static"] > 1.1


@pytest.mark.parametrize("c", range(len(CONCURRENCIES)))
def test_hopeless_drafts_cost_next_to_nothing(c: int) -> None:
    assert simulate_width.made_up("hopeless", c, steps=1000, seeds=1)["over_off"] >= 0.97


@pytest.mark.parametrize("c", range(len(CONCURRENCIES)))
@pytest.mark.parametrize(("card", "task"), [(CARDS[0], 0), (CARDS[0], 4), (CARDS[1], 1), (CARDS[1], 5)])
def test_the_bar_at_published_points(card: Card, task: int, c: int) -> None:
    """Of all points the ones furthest apart; `python -m launch.simulate_width` computes the rest."""
    row = simulate_width.point(card, card.tasks[task], c, steps=600, seeds=1)
    for launch in simulate_width.LAUNCHES:
        assert row[launch]["over_better"] >= 0.98
        assert row[launch]["over_off"] >= 1.0


def test_runs_of() -> None:
    assert runs_of([16, 16, 16, 1, 1]) == "16x3 1x2"
    assert plot_width.steps_of("16x3 1x2") == [16, 16, 16, 1, 1]


def test_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate_width.main(["--steps", "20", "--seeds", "1", "--output", str(tmp_path / "width.json")])
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
